/* The same, which first recomputes its certificate, as examples/firmware/main.c does. */
#define WITH_SELFTEST
#include "colibri.c"
