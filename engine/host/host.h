/* What the host layer's files share: an open map. */
#ifndef COLIBRI_HOST_INTERNAL_H
#define COLIBRI_HOST_INTERNAL_H

#include "colibri_host.h"
#include "format/format.h"

/* What a colibri_map_t holds while it is open. */
typedef struct {
    const uint8_t *model; /* NULL: not open */
    size_t bytes;         /* of the model */
    size_t span;          /* of its pages */
    size_t copied;        /* of them from the start are a copy; the rest is the file */
    const clb_layer *layers;
    const clb_expert *experts;
    uint32_t layer_count, expert_count;
    int64_t changed[2];  /* when the file was last written to: seconds, nanoseconds */
    int32_t file, guard; /* guard: -1 where there is none */
} clb_map;

_Static_assert(sizeof(clb_map) <= sizeof(colibri_map_t), "the caller's memory holds the map");

/* The whole pages from the file that expert `e` lies on; 0 bytes where its entry is not within the
 * file. */
typedef struct {
    uint8_t *at;
    size_t bytes;
} clb_pages;

clb_pages clb_expert_pages(const clb_map *map, const clb_expert *e);

#endif
