/* A language model on a device: the model is a mapped file, the text comes as it is generated. No
 * Python, no library but Colibri's.
 *
 *     ./chat [options] EXPORT/ "a prompt"     -: the prompt is the standard input
 *     ./chat [options] EXPORT/                every line is a prompt
 *
 * The same prompt, options and export give the bytes of `colibri generate`. Text goes to stdout,
 * all else to stderr. */
#define _POSIX_C_SOURCE 200809L
#include "colibri_host.h"
#include "colibri_inspect.h"
#include "colibri_lm.h"
#include "colibri_tokenizer.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INTERRUPTED = 130 };

/* --- what the user asks for --- */

typedef struct {
    long max_new_tokens, threads, top_k;
    double temperature, top_p, min_p, repetition_penalty;
    uint64_t seed;
    int raw;   /* the prompt's tokens alone, without what begins a text */
    int plain; /* special tokens that the prompt spells stay text */
    const char *directory, *prompt;
} options;

static const char usage[] =
    "usage: chat [options] EXPORT/ [PROMPT]    PROMPT: text, - for the standard input; none: every "
    "line is one\n"
    "  -n, --max-new-tokens N   128             --temperature T          0: the likeliest token\n"
    "  --top-k K                0: all          --top-p P                1: all\n"
    "  --min-p P                0: all          --repetition-penalty R   1: none\n"
    "  --seed S                 0               --threads N              0: one a processor\n"
    "  --raw                    the prompt's tokens alone, without what begins a text (BOS)\n"
    "  --no-special             special tokens that the prompt spells stay text: for text of "
    "people you do not trust\n";

static void fail(int code, const char *form, ...) {
    va_list values;
    va_start(values, form);
    fputs("chat: ", stderr);
    vfprintf(stderr, form, values);
    fputc('\n', stderr);
    va_end(values);
    exit(code);
}

/* The number that an option is followed by. */
static double number(const char *name, const char *text, double least, double most) {
    char *end = NULL;
    const double value = text == NULL ? 0 : strtod(text, &end);
    if (text == NULL || end == text || *end != 0 || !(value >= least && value <= most)) {
        fail(2, "%s takes a number from %g to %g", name, least, most);
    }
    return value;
}

static options parse(int argc, char **argv) {
    options o = {.max_new_tokens = 128, .top_p = 1, .repetition_penalty = 1};
    int plain = 0; /* after --, nothing is an option */
    for (int i = 1; i < argc; ++i) {
        const char *name = argv[i], *next = argv[i + 1]; /* argv ends with NULL */
        if (plain || name[0] != '-' || name[1] == 0) {
            if (o.prompt != NULL) {
                fail(2, "more than one prompt: put quotes around it\n%s", usage);
            }
            *(o.directory == NULL ? &o.directory : &o.prompt) = name;
        } else if (strcmp(name, "--") == 0) {
            plain = 1;
        } else if (strcmp(name, "--raw") == 0) {
            o.raw = 1;
        } else if (strcmp(name, "--no-special") == 0) {
            o.plain = 1;
        } else if (strcmp(name, "-n") == 0 || strcmp(name, "--max-new-tokens") == 0) {
            o.max_new_tokens = (long)number(name, next, 0, INT32_MAX), ++i;
        } else if (strcmp(name, "--temperature") == 0) {
            o.temperature = number(name, next, 0, 1e30), ++i;
        } else if (strcmp(name, "--top-k") == 0) {
            o.top_k = (long)number(name, next, 0, INT32_MAX), ++i;
        } else if (strcmp(name, "--top-p") == 0) {
            o.top_p = number(name, next, 1e-30, 1), ++i;
        } else if (strcmp(name, "--min-p") == 0) {
            o.min_p = number(name, next, 0, 1), ++i;
        } else if (strcmp(name, "--repetition-penalty") == 0) {
            o.repetition_penalty = number(name, next, 1e-30, 1e30), ++i;
        } else if (strcmp(name, "--seed") == 0) {
            o.seed = (uint64_t)number(name, next, 0, 0x1p53), ++i;
        } else if (strcmp(name, "--threads") == 0) {
            o.threads = (long)number(name, next, 0, COLIBRI_POOL_MOST), ++i;
        } else {
            fail(2, "there is no option %s\n%s", name, usage);
        }
    }
    if (o.directory == NULL) {
        fail(2, "which export?\n%s", usage);
    }
    return o;
}

/* --- what is loaded --- */

typedef struct {
    colibri_map_t map;
    colibri_pool_t pool;
    colibri_context_t *ctx;
    colibri_tokenizer_t tokenizer;
    float *logits;    /* (vocabulary) */
    int32_t *scratch; /* (vocabulary) */
    int32_t *ids;     /* (context + 1): the prompt, then what was generated */
} session;

static void *memory(size_t count, size_t size, size_t align) {
    const int possible = size == 0 || count <= (SIZE_MAX - align) / size;
    void *found = possible ? aligned_alloc(align, (count * size + align) / align * align) : NULL;
    if (found == NULL) {
        fail(1, "there is not enough memory for %zu times %zu bytes", count, size);
    }
    return found;
}

/* All bytes of a file, or of the standard input, aligned to 64; NULL where it cannot be read. */
static uint8_t *read_all(FILE *file, size_t *size) {
    size_t room = 1 << 16, got;
    uint8_t *data = memory(room, 1, 64);
    for (*size = 0; (got = fread(data + *size, 1, room - *size, file)) > 0;) {
        *size += got;
        if (*size == room) {
            uint8_t *larger = memory(room *= 2, 1, 64);
            memcpy(larger, data, *size);
            free(data);
            data = larger;
        }
    }
    if (ferror(file)) {
        free(data);
        return NULL;
    }
    return data;
}

static void load(session *s, const options *o) {
    char path[4096];
    snprintf(path, sizeof path, "%s/model.bin", o->directory);
    int error = colibri_map_open(&s->map, path, 0);
    if (error != COLIBRI_OK) {
        fail(1, "%s: %s", path, colibri_error_text(error));
    }
    const uint8_t *model = colibri_map_model(&s->map);
    const size_t size = colibri_model_size(model);
    void *arena = memory(size, 1, 64);
    s->ctx = colibri_init(arena, size, model);
    if (s->ctx == NULL) {
        fail(1, "%s: %s", path, colibri_error_text(colibri_diagnose(arena, size, model)));
    }
    if (s->ctx->context_tokens == 0) {
        fail(1, "%s is no language model: it maps rows of numbers", path);
    }
    snprintf(path, sizeof path, "%s/tokenizer.bin", o->directory);
    FILE *file = fopen(path, "rb");
    size_t bytes = 0;
    const uint8_t *tokenizer = file == NULL ? NULL : read_all(file, &bytes);
    if (tokenizer == NULL) {
        fail(1, "%s cannot be read: export the model again, which writes it or says why it cannot",
             path);
    }
    fclose(file);
    error = colibri_tokenizer_open(&s->tokenizer, tokenizer, bytes);
    if (error != COLIBRI_OK) {
        fail(1, "%s: %s", path, colibri_error_text(error));
    }
    colibri_pool_start(&s->pool, (int)o->threads);
    s->ctx->parallel = colibri_pool_run;
    s->ctx->parallel_user = &s->pool;
    s->logits = memory(s->ctx->output_size, sizeof *s->logits, 64);
    s->scratch = memory(s->ctx->output_size, sizeof *s->scratch, 64);
    s->ids = memory((size_t)s->ctx->context_tokens + 1, sizeof *s->ids, 64);
}

/* --- text as it comes --- */

/* The bytes of the character that `text` begins with; 0 where it is cut off, and -n where its first
 * n bytes are none. */
static int character(const uint8_t *text, size_t bytes) {
    const uint8_t first = text[0];
    const int length = first < 0x80   ? 1
                       : first < 0xC2 ? 0
                       : first < 0xE0 ? 2
                       : first < 0xF0 ? 3
                       : first < 0xF5 ? 4
                                      : 0;
    for (int i = 1; i < length; ++i) {
        const uint8_t least = i > 1 ? 0x80 : first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const uint8_t most = i > 1 ? 0xBF : first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if ((size_t)i == bytes) {
            return 0;
        }
        if (text[i] < least || text[i] > most) {
            return -i;
        }
    }
    return length == 0 ? -1 : length;
}

typedef struct {
    uint8_t waiting[4]; /* a character's first bytes */
    size_t count;
} stream;

/* Print whole characters, U+FFFD for what is none; keep what is not whole yet. */
static void print(stream *to, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
        to->waiting[to->count++] = (uint8_t)text[i];
        for (int length; to->count > 0 && (length = character(to->waiting, to->count)) != 0;) {
            const size_t done = (size_t)(length < 0 ? -length : length);
            fwrite(length < 0 ? "\xEF\xBF\xBD" : (const char *)to->waiting, 1,
                   length < 0 ? 3 : done, stdout);
            memmove(to->waiting, to->waiting + done, to->count -= done);
        }
    }
    fflush(stdout);
}

static void print_token(session *s, stream *to, int32_t id, int options) {
    char text[4096];
    size_t bytes;
    const int error =
        colibri_tokenizer_decode(&s->tokenizer, &id, 1, options, text, sizeof text, &bytes);
    if (error != COLIBRI_OK) {
        fail(1, "%s", colibri_error_text(error));
    }
    print(to, text, bytes);
}

/* --- one answer --- */

static volatile sig_atomic_t interrupted;

static void interrupt(int number) {
    (void)number;
    interrupted = 1;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The prompt's ids into s->ids; how many, or -1 with the reason on stderr. */
static int encode(session *s, const options *o, const char *text, size_t bytes) {
    const size_t scratch_bytes = colibri_tokenizer_scratch(&s->tokenizer, bytes),
                 room = s->ctx->context_tokens;
    void *scratch = memory(scratch_bytes, 1, 64);
    const int options =
        (o->raw ? 0 : COLIBRI_TOKENIZER_TEMPLATE) | (o->plain ? 0 : COLIBRI_TOKENIZER_SPECIAL);
    size_t count;
    const int error = colibri_tokenizer_encode(&s->tokenizer, text, bytes, options, s->ids, room,
                                               &count, scratch, scratch_bytes);
    free(scratch);
    if (error == COLIBRI_ERR_OUTPUT) {
        fprintf(stderr,
                "chat: the prompt has %zu tokens, but the context holds %zu: shorten it, or give "
                "the model a longer "
                "context (colibri set --context)\n",
                count, room);
        return -1;
    }
    if (error != COLIBRI_OK) {
        fprintf(stderr, "chat: %s\n", colibri_error_text(error));
        return -1;
    }
    if (count == 0 && !o->raw && colibri_tokenizer_bos(&s->tokenizer) >= 0) {
        s->ids[count++] = colibri_tokenizer_bos(&s->tokenizer);
    }
    if (count == 0) {
        fputs("chat: the prompt is empty, and nothing begins a text: give it some text to go on "
              "from\n",
              stderr);
        return -1;
    }
    return (int)count;
}

/* Continue a text and print what comes; returns the exit code. */
static int answer(session *s, const options *o, const char *text, size_t bytes) {
    colibri_context_t *ctx = s->ctx;
    const int prompt = encode(s, o, text, bytes), vocabulary = (int)ctx->output_size;
    if (prompt < 0) {
        return EXIT_FAILURE;
    }
    colibri_sampler_t sampler = {
        .history = s->ids,
        .repetition_penalty = (float)o->repetition_penalty,
        .temperature = (float)o->temperature,
        .top_k = (int)o->top_k,
        .top_p = (float)o->top_p,
        .min_p = (float)o->min_p,
        .seed = o->seed,
    };
    stream out = {.count = 0};
    const double start = seconds();
    double first = start, last = start;
    long tokens = 0;
    int drawn = 0, options = COLIBRI_TOKENIZER_SKIP_SPECIAL, full = 0;
    ctx->position = 0;
    int error = colibri_lm_evaluate(ctx, s->ids, prompt, s->logits);
    const double prompt_seconds = seconds() - start;
    while (error == COLIBRI_OK && tokens < o->max_new_tokens && !interrupted && !full) {
        sampler.history_count = prompt + (int)tokens;
        const int32_t id = colibri_lm_sample(&sampler, s->logits, vocabulary, s->scratch);
        last = seconds();
        first = drawn++ == 0 ? last : first;
        if (colibri_tokenizer_ends(&s->tokenizer, id)) {
            break;
        }
        s->ids[prompt + tokens++] = id;
        print_token(s, &out, id, options);
        if (!colibri_tokenizer_special(&s->tokenizer, id)) {
            options |=
                COLIBRI_TOKENIZER_CONTINUE; /* from now on a token's space is one between words */
        }
        full = ctx->position == ctx->context_tokens && tokens < o->max_new_tokens;
        if (!full && tokens < o->max_new_tokens) {
            error = colibri_lm_evaluate(ctx, &id, 1, s->logits);
        }
    }
    fputs(out.count > 0 ? "\xEF\xBF\xBD\n" : "\n", stdout);
    fflush(stdout);
    error = error != COLIBRI_OK ? error : colibri_map_status(&s->map);
    if (error != COLIBRI_OK) {
        fail(1, "%s", colibri_error_text(error));
    }
    if (full) {
        fprintf(stderr, "the context of %u tokens is full\n", (unsigned)ctx->context_tokens);
    }
    fprintf(stderr, "%d prompt tokens at %.1f/s, %ld new tokens", prompt, prompt / prompt_seconds,
            tokens);
    if (drawn > 1) {
        fprintf(stderr, " at %.1f/s", (drawn - 1) / (last - first));
    }
    fputc('\n', stderr);
    return interrupted ? INTERRUPTED : EXIT_SUCCESS;
}

/* Every line is a prompt; Ctrl-C stops an answer, Ctrl-D ends. */
static int converse(session *s, const options *o) {
    char *line = NULL;
    size_t room = 0;
    for (;;) {
        fputs("> ", stderr);
        ssize_t bytes = getline(&line, &room, stdin);
        if (bytes < 0 && interrupted && !feof(stdin)) {
            bytes = 0;
        }
        interrupted = 0;
        clearerr(stdin);
        if (bytes < 0) {
            break;
        }
        bytes -= bytes > 0 && line[bytes - 1] == '\n';
        if (bytes > 0) {
            answer(s, o, line, (size_t)bytes);
            interrupted = 0;
        }
    }
    free(line);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    static session s;
    const options o = parse(argc, argv);
    load(&s, &o);
    /* Without SA_RESTART, so that waiting for a line ends too. */
    struct sigaction action = {.sa_handler = interrupt};
    sigaction(SIGINT, &action, NULL);
    int code;
    if (o.prompt == NULL) {
        code = converse(&s, &o);
    } else if (strcmp(o.prompt, "-") == 0) {
        size_t bytes;
        const char *text = (const char *)read_all(stdin, &bytes);
        if (text == NULL) {
            fail(1, "the standard input cannot be read");
        }
        code = answer(
            &s, &o, text,
            bytes - (bytes > 0 && text[bytes - 1] == '\n')); /* without the end of its last line */
    } else {
        code = answer(&s, &o, o.prompt, strlen(o.prompt));
    }
    colibri_pool_stop(&s.pool);
    colibri_free(s.ctx);
    colibri_map_close(&s.map);
    return code;
}
