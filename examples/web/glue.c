/* All that JavaScript needs beside the engine's own functions: a route hook that leaves the
 * module. */
#include "colibri.h"

__attribute__((import_module("colibri"), import_name("on_route"))) colibri_route_hook on_route;

__attribute__((export_name("watch_routes"))) void watch_routes(colibri_context_t *ctx) {
    ctx->on_route = on_route;
}
