/* Every order in which a producer and two consumers can take the steps of colibri_ring.h, on a ring
 * of two slots.
 *
 * Each atomic operation of the header hands control to a scheduler, which replays one sequence of
 * choices after another. What a thread does next follows from the values its steps returned, so the
 * ring's content and those values are the state: one that has been seen is not continued. Orders
 * are sequentially consistent ones; that the memory orders are strong enough is the thread
 * sanitizer's to show.
 *
 * Prints the number of states and of finished orders. Exit status 1, with the order, where a
 * pointer is lost, comes out twice, or a consumer gets its own out of order. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef uint32_t colibri_ring_count;
typedef void *colibri_ring_slot;

static uintptr_t take_turn(void);
static uintptr_t note(uintptr_t value);
static int replace(uint32_t *at, uint32_t *old, uint32_t value);

#define COLIBRI_RING_LOAD(at, order)         (take_turn(), note((uintptr_t)*(at)), *(at))
#define COLIBRI_RING_STORE(at, value, order) (take_turn(), note(0), (void)(*(at) = (value)))
#define COLIBRI_RING_REPLACE(at, old, value) replace(at, old, value)

#include "colibri_ring.h"

enum { SLOTS = 2, PUSHES = 4, POPS = 2, THREADS = 3, MOST = 64, STACK = 1 << 16, TABLE = 1 << 20 };

typedef struct {
    uint64_t values[MOST]; /* of one thread's steps */
    uint32_t steps;
    int ended;
} history;

static colibri_ring_t ring;
static colibri_ring_slot slots[SLOTS];
static char payload[PUSHES + 1]; /* the pointers' targets: 1, 2, … in the order of the pushes */

static ucontext_t scheduler, threads[THREADS];
static char stacks[THREADS][STACK];
static history histories[THREADS];
static int current = -1, running; /* running: steps are the scheduler's to order */
static uint32_t pushed, got[THREADS][POPS + PUSHES], got_count[THREADS];

static uintptr_t take_turn(void) {
    if (running) {
        swapcontext(&threads[current], &scheduler);
    }
    return 0;
}

static uintptr_t note(uintptr_t value) {
    if (running) {
        history *h = &histories[current];
        if (h->steps == MOST) {
            abort();
        }
        h->values[h->steps++] = value;
    }
    return value;
}

static int replace(uint32_t *at, uint32_t *old, uint32_t value) {
    take_turn();
    const int same = *at == *old;
    note(*at);
    if (same) {
        *at = value;
    } else {
        *old = *at;
    }
    return same;
}

static void producer(void) {
    for (int n = 0; n < PUSHES; ++n) {
        pushed += colibri_ring_push(&ring, &payload[pushed + 1]) ? 1u : 0u;
    }
}

static void consumer(int self) {
    for (int n = 0; n < POPS; ++n) {
        const char *p = colibri_ring_pop(&ring);
        if (p != NULL) {
            got[self][got_count[self]++] = (uint32_t)(p - payload);
        }
    }
}

static void run(int self) {
    if (self == 0) {
        producer();
    } else {
        consumer(self);
    }
    histories[self].ended = 1;
}

static void restart(void) {
    running = 0;
    colibri_ring_init(&ring, slots, SLOTS);
    memset(slots, 0, sizeof slots);
    memset(histories, 0, sizeof histories);
    memset(got_count, 0, sizeof got_count);
    memset(got, 0, sizeof got);
    pushed = 0;
    running = 1;
    for (int t = 0; t < THREADS; ++t) {
        getcontext(&threads[t]);
        threads[t].uc_stack.ss_sp = stacks[t];
        threads[t].uc_stack.ss_size = STACK;
        threads[t].uc_link = &scheduler;
        makecontext(&threads[t], (void (*)(void))run, 1, t);
        current = t;
        swapcontext(&scheduler, &threads[t]); /* up to its first step */
    }
}

static void step(int t) {
    current = t;
    swapcontext(&scheduler, &threads[t]);
}

/* --- states seen --- */

typedef struct {
    uint64_t words[1 + SLOTS + THREADS * (1 + MOST)];
    uint32_t count;
} state;

static uint64_t *table[TABLE]; /* whole states: a hash alone could take two for one */
static uint64_t states;

static state now(void) {
    state s = {.count = 0};
    s.words[s.count++] = (uint64_t)ring.pushed << 32 | ring.popped;
    for (int n = 0; n < SLOTS; ++n) {
        s.words[s.count++] = (uint64_t)(uintptr_t)slots[n];
    }
    for (int t = 0; t < THREADS; ++t) {
        s.words[s.count++] = histories[t].steps;
        for (uint32_t n = 0; n < histories[t].steps; ++n) {
            s.words[s.count++] = histories[t].values[n];
        }
    }
    return s;
}

static int is_new(const state *s) {
    uint64_t hash = 1469598103934665603u;
    for (uint32_t n = 0; n < s->count; ++n) {
        hash = (hash ^ s->words[n] ^ s->words[n] >> 29) * 1099511628211u;
    }
    for (uint64_t at = hash % TABLE;; at = (at + 1) % TABLE) {
        if (table[at] == NULL) {
            table[at] = malloc((s->count + 1) * sizeof(uint64_t));
            table[at][0] = s->count;
            memcpy(table[at] + 1, s->words, s->count * sizeof(uint64_t));
            if (++states == TABLE / 2) {
                abort();
            }
            return 1;
        }
        if (table[at][0] == s->count &&
            memcmp(table[at] + 1, s->words, s->count * sizeof(uint64_t)) == 0) {
            return 0;
        }
    }
}

/* --- what must hold --- */

static const char *broken(void) {
    uint32_t seen[PUSHES + 1] = {0}, taken = 0;
    running = 0;
    for (char *p; (p = colibri_ring_pop(&ring)) != NULL &&
                  got_count[0] < POPS + PUSHES;) { /* what is left */
        got[0][got_count[0]++] = (uint32_t)(p - payload);
    }
    for (int t = 0; t < THREADS; ++t) {
        for (uint32_t n = 0; n < got_count[t]; ++n, ++taken) {
            if (got[t][n] < 1 || got[t][n] > pushed || ++seen[got[t][n]] > 1) {
                return "a pointer came out twice, or was never pushed";
            }
            if (n > 0 && got[t][n] <= got[t][n - 1]) {
                return "a consumer got its pointers out of order";
            }
        }
    }
    return taken == pushed ? NULL : "a pointer was lost";
}

int main(void) {
    static char path[THREADS * MOST]; /* the choices that lead to the present state */
    int depth = 0;
    uint64_t orders = 0;
    restart();
    for (int next = 0;;) {
        if (next == 0 && depth > 0) {
            const state s = now();
            if (!is_new(&s)) {
                next = THREADS;
            }
        }
        while (next < THREADS && histories[next].ended) {
            ++next;
        }
        if (next < THREADS) {
            path[depth++] = (char)next;
            step(next);
            next = 0;
            continue;
        }
        if (histories[0].ended && histories[1].ended && histories[2].ended) {
            ++orders;
            const char *fault = broken();
            if (fault != NULL) {
                printf("%s, in the order ", fault);
                for (int n = 0; n < depth; ++n) {
                    printf("%d", path[n]);
                }
                printf("\n");
                return 1;
            }
        }
        if (depth == 0) {
            break;
        }
        next = path[--depth] + 1; /* back, and the other way */
        restart();
        for (int n = 0; n < depth; ++n) {
            step(path[n]);
        }
    }
    printf("%llu states, %llu orders\n", (unsigned long long)states, (unsigned long long)orders);
    return 0;
}
