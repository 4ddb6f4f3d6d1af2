/* Damaged tokenizer files under sanitizers, for test_hostile.py:  fuzz TEXT BASE... < cases > one
 * line a case A case: base (u32), size (u32), 1 where checksums are made to fit (u32), bytes of
 * scratch memory of one of the encodings (u32), bytes of a text of its own (u32; none: TEXT),
 * patches (u32), and of each patch its place (u32) and its byte (u32); then the text. The line has
 * the code of open, and where that is 0 of encoding the text with and without enough scratch
 * memory, and of decoding what came out. Each block of memory has exactly its size. */
#include "colibri_tokenizer.h"

#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    unsigned char *data;
    size_t size;
} bytes;

static bytes read_file(const char *path) {
    FILE *f = fopen(path, "rb");
    fseek(f, 0, SEEK_END);
    bytes b = {NULL, (size_t)ftell(f)};
    b.data = malloc(b.size + 1);
    rewind(f);
    b.size = fread(b.data, 1, b.size, f);
    fclose(f);
    return b;
}

static int number(uint32_t *n) { return fread(n, 4, 1, stdin) == 1; }

static uint32_t crc32_of(const unsigned char *p, size_t size) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t n = 0; n < size; ++n) {
        crc ^= p[n];
        for (int bit = 0; bit < 8; ++bit) {
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        }
    }
    return ~crc;
}

static void repair(unsigned char *file, size_t size) {
    if (size >= 128) {
        const uint32_t body = crc32_of(file + 128, size - 128);
        memcpy(file + 112, &body, 4);
        const uint32_t head = crc32_of(file, 124);
        memcpy(file + 124, &head, 4);
    }
}

static void run(const unsigned char *file, size_t size, bytes text, size_t little) {
    colibri_tokenizer_t t;
    const int error = colibri_tokenizer_open(&t, file, size);
    printf("%d", error);
    if (error == COLIBRI_OK) {
        const size_t enough = colibri_tokenizer_scratch(&t, text.size),
                     sizes[3] = {enough, little, 40};
        for (int n = 0; n < 3; ++n) {
            size_t count = 0, decoded = 0;
            unsigned char *copy = malloc(text.size);
            void *scratch = malloc(sizes[n]);
            int32_t *ids = malloc(text.size * sizeof *ids);
            memcpy(copy, text.data, text.size);
            printf(" %d",
                   colibri_tokenizer_encode(&t, (const char *)copy, text.size, n == 1 ? 0 : 3, ids,
                                            text.size, &count, scratch, sizes[n]));
            count = count < text.size ? count : text.size;
            char out[64];
            printf(" %d", colibri_tokenizer_decode(&t, ids, count, n, out, sizeof out, &decoded));
            free(ids);
            free(scratch);
            free(copy);
        }
    }
    printf("\n");
}

int main(int argc, char **argv) {
    bytes text = read_file(argv[1]), bases[16] = {{NULL, 0}};
    for (int n = 2; n < argc && n < 18; ++n) {
        bases[n - 2] = read_file(argv[n]);
    }
    uint32_t base, size, fix, little, own, patches;
    while (number(&base) && number(&size) && number(&fix) && number(&little) && number(&own) &&
           number(&patches)) {
        const size_t room = (size + 63u) / 64 * 64 + 64;
        unsigned char *file = aligned_alloc(64, room);
        memset(file, 0, room);
        memcpy(file, bases[base].data, size < bases[base].size ? size : bases[base].size);
        while (patches-- > 0) {
            uint32_t at, byte;
            if (!number(&at) || !number(&byte)) {
                return 2;
            }
            file[at] = (unsigned char)byte;
        }
        const bytes given = {malloc(own + 1), own};
        if (fread(given.data, 1, own, stdin) != own) {
            return 2;
        }
        if (fix) {
            repair(file, size);
        }
        ASAN_POISON_MEMORY_REGION(file + size, room - size);
        alarm(20);
        run(file, size, own > 0 ? given : text, little);
        fflush(stdout);
        ASAN_UNPOISON_MEMORY_REGION(file, room);
        free(given.data);
        free(file);
    }
    for (int n = 0; n < 16; ++n) {
        free(bases[n].data);
    }
    free(text.data);
    return 0;
}
