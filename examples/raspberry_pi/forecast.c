/* The smart meter's forecast on a Linux board: the engine is a shared library, the model a file
 * that is mapped.
 *
 *     ./forecast ./libcolibri.so model.bin < day.f32
 *
 * A line for each row of features: the coming change of demand in the model's unit, with digits
 * enough for every bit. Nothing of the model or the engine is compiled in: a new model.bin or
 * libcolibri.so takes a restart. */
#include "colibri.h"
#include "colibri_inspect.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

static void *library;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "forecast: %s: %s\n", what, why);
    exit(EXIT_FAILURE);
}

/* The library's function of that name, with the type that the header gives it. */
#define ENGINE(name) ((__typeof__(&name))engine_function(#name))

static void *engine_function(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fail(name, dlerror());
    }
    return found;
}

static const uint8_t *map(const char *path, size_t *size) {
    struct stat about;
    const int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &about) != 0 || about.st_size == 0) {
        fail(path, "cannot be read, or is empty");
    }
    *size = (size_t)about.st_size;
    const void *bytes =
        mmap(NULL, *size, PROT_READ, MAP_PRIVATE, file, 0); /* page-aligned, so 64-byte aligned */
    if (bytes == MAP_FAILED) {
        fail(path, "cannot be mapped");
    }
    return bytes;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fail("usage", "forecast ./libcolibri.so model.bin < rows.f32");
    }
    library = dlopen(argv[1], RTLD_NOW);
    if (library == NULL) {
        fail(argv[1], dlerror());
    }
    const __typeof__(&colibri_forward) forward = ENGINE(colibri_forward);
    const __typeof__(&colibri_error_text) error_text = ENGINE(colibri_error_text);

    size_t size;
    const uint8_t *model = map(argv[2], &size);
    const int bad = ENGINE(colibri_check)(model, size, COLIBRI_CHECK_WEIGHTS);
    if (bad != COLIBRI_OK) {
        fail(argv[2], error_text(bad));
    }
    const size_t bytes = ENGINE(colibri_model_size)(model);
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    colibri_context_t *ctx = ENGINE(colibri_init)(memory, bytes, model);
    if (ctx == NULL) {
        fail(argv[2], error_text(ENGINE(colibri_diagnose)(memory, bytes, model)));
    }
    float *input = calloc(ctx->input_size, sizeof *input),
          *output = calloc(ctx->output_size, sizeof *output);
    if (input == NULL || output == NULL) {
        fail("memory", "there is not enough");
    }
    const int differs =
        ENGINE(colibri_selftest)(ctx, output); /* this board's bits are the exporter's */
    if (differs != COLIBRI_OK) {
        fail(argv[2], error_text(differs));
    }
    while (fread(input, sizeof *input, ctx->input_size, stdin) == ctx->input_size) {
        forward(ctx, input, output, 1);
        printf("%.9g\n", (double)output[0]);
    }
    ENGINE(colibri_free)(ctx);
    return EXIT_SUCCESS;
}
