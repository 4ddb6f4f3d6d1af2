/* The models of the certificate runner, and where there is generated code its functions. */
#include "colibri.h"

typedef struct {
    const char *name;
    const uint8_t *bytes; /* the whole file */
    const uint8_t *flash; /* what the generated code reads */
    colibri_context_t *(*init)(void *mem, size_t mem_size, const uint8_t *model_bin);
    int (*selftest)(colibri_context_t *ctx, float *output);
} model;

extern const model models[];
extern const int model_count;
