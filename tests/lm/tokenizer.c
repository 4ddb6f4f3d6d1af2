/* The C tokenizer on files, for test_tokenizer.py:  tokenizer FILE MODE OPTIONS < records > records
 * A record is its size (u32) and that many bytes. MODE e: text to ids, d: ids to bytes; with a scratch and an output that
 * end where they should, in memory of its own, so that a sanitizer sees a step too far. MODE t: time encoding, N times. */
#include "colibri_inspect.h"
#include "colibri_tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static unsigned char *read_all(FILE *f, size_t *size)
{
    unsigned char *data = NULL;
    size_t room = 0;
    *size = 0;
    for (;;) {
        if (*size == room) {
            room = room * 2 + (1 << 16);
            data = realloc(data, room);
        }
        const size_t n = fread(data + *size, 1, room - *size, f);
        if (n == 0) {
            return data;
        }
        *size += n;
    }
}

static void put(const void *data, uint32_t size)
{
    fwrite(&size, 4, 1, stdout);
    fwrite(data, 1, size, stdout);
}

static int encode(const colibri_tokenizer_t *t, const unsigned char *text, size_t size, int options)
{
    /* From a small scratch on, until it suffices. */
    size_t room = size + 16, count = 0, bytes = 64;
    for (;;) {
        void *scratch = malloc(bytes);
        char *copy = malloc(size > 0 ? size : 1);
        int32_t *ids = malloc(room * sizeof *ids);
        memcpy(copy, text, size);
        const int error = colibri_tokenizer_encode(t, copy, size, options, ids, room, &count, scratch, bytes);
        const int last = bytes >= colibri_tokenizer_scratch(t, size);
        if (error == COLIBRI_OK) {
            put(ids, (uint32_t)(count * sizeof *ids));
        }
        free(ids);
        free(copy);
        free(scratch);
        if (error == COLIBRI_ERR_OUTPUT && count > room) {
            room = count;
        } else if (error == COLIBRI_ERR_SCRATCH && !last) {
            bytes = bytes * 2 < colibri_tokenizer_scratch(t, size) ? bytes * 2 : colibri_tokenizer_scratch(t, size);
        } else {
            return error;
        }
    }
}

static int decode(const colibri_tokenizer_t *t, const unsigned char *record, size_t size, int options)
{
    size_t bytes = 0;
    int32_t *ids = malloc(size > 0 ? size : 1);
    memcpy(ids, record, size);
    int error = colibri_tokenizer_decode(t, ids, size / 4, options, NULL, 0, &bytes);
    if (error == COLIBRI_OK || error == COLIBRI_ERR_OUTPUT) {
        char *out = malloc(bytes > 0 ? bytes : 1);
        error = colibri_tokenizer_decode(t, ids, size / 4, options, out, bytes, &bytes);
        put(out, (uint32_t)bytes);
        free(out);
    }
    free(ids);
    return error;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    colibri_tokenizer_t t;
    size_t size, input_size;
    if (argc < 4) {
        return 2;
    }
    FILE *f = fopen(argv[1], "rb");
    unsigned char *file = read_all(f, &size), *aligned = aligned_alloc(64, (size + 63) / 64 * 64 + 64);
    fclose(f);
    /* The file ends where the memory does, as far as its alignment allows. */
    memcpy(aligned, file, size);
    free(file);
    const double start = now();
    const int error = colibri_tokenizer_open(&t, aligned, size);
    if (argv[2][0] == 't') {
        printf("open %.6f\n", now() - start);
    }
    if (error != COLIBRI_OK) {
        fprintf(stderr, "%s: %s\n", colibri_error_name(error), colibri_error_text(error));
        return 1;
    }
    const int options = atoi(argv[3]);
    unsigned char *input = read_all(stdin, &input_size);
    for (size_t at = 0; at + 4 <= input_size;) {
        uint32_t bytes;
        memcpy(&bytes, input + at, 4);
        at += 4;
        if (argv[2][0] == 't') {
            size_t count, scratch_bytes = colibri_tokenizer_scratch(&t, bytes), room = bytes + 16;
            void *scratch = malloc(scratch_bytes);
            int32_t *ids = malloc(room * sizeof *ids);
            for (int n = 0; n < 3; ++n) {
                const double from = now();
                const int failed = colibri_tokenizer_encode(&t, (char *)input + at, bytes, options, ids, room, &count,
                                                            scratch, scratch_bytes);
                const double seconds = now() - from;
                printf("encode %d %zu ids %.6f s %.2f MB/s\n", failed, count, seconds, bytes / seconds / 1e6);
            }
            free(ids);
            free(scratch);
        } else {
            const int failed = argv[2][0] == 'e' ? encode(&t, input + at, bytes, options)
                                                 : decode(&t, input + at, bytes, options);
            if (failed != COLIBRI_OK) {
                fprintf(stderr, "%s: %s\n", colibri_error_name(failed), colibri_error_text(failed));
                return 1;
            }
        }
        at += bytes;
    }
    free(input);
    free(aligned);
    return 0;
}
