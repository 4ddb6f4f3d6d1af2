/* Colibri, optional: a lock-free single-producer, multiple-consumer ring of pointers, without
 * copies or system calls: tokens for threads that run experts, experts for threads that prefetch
 * them. Header only, C11 or C++11; the engine does not depend on it.
 *
 *     static colibri_ring_slot slots[256];
 *     colibri_ring_t ring;
 *     colibri_ring_init(&ring, slots, 256);
 *     if (!colibri_ring_push(&ring, token)) { … } // the one producer: full, so do the work here
 *     while ((token = colibri_ring_pop(&ring))) { … }     // any number of consumers
 *
 * A consumer sees after the pop what the producer wrote before the push. Results return through
 * further rings, with each consumer as the producer of one. Every pointer is popped once; each
 * consumer gets its pointers in the order of the pushes. Neither side waits for the other: a thread
 * that stops in the middle of a call blocks no other.
 *
 * With COLIBRI_RING_SINGLE, or a compiler without atomics, it uses plain loads and stores: for one
 * thread only. */
#ifndef COLIBRI_RING_H
#define COLIBRI_RING_H

#include <stdint.h>

#if defined(__STDC_NO_ATOMICS__) && !defined(COLIBRI_RING_SINGLE)
#define COLIBRI_RING_SINGLE
#endif

#ifdef COLIBRI_RING_SINGLE
typedef uint32_t colibri_ring_count;
typedef void *colibri_ring_slot;
#define COLIBRI_RING_LOAD(at, order)         (*(at))
#define COLIBRI_RING_STORE(at, value, order) ((void)(*(at) = (value)))
#define COLIBRI_RING_REPLACE(at, old, value)                                                       \
    (*(at) == *(old) ? (*(at) = (value), 1) : (*(old) = *(at), 0))
#elif defined(__cplusplus) /* of the same size and layout as C's, so that both may use one ring */
#include <atomic>
typedef std::atomic<uint32_t> colibri_ring_count;
typedef std::atomic<void *> colibri_ring_slot;
#define COLIBRI_RING_LOAD(at, order)         (at)->load(std::memory_order_##order)
#define COLIBRI_RING_STORE(at, value, order) (at)->store(value, std::memory_order_##order)
#define COLIBRI_RING_REPLACE(at, old, value)                                                       \
    (at)->compare_exchange_strong(*(old), value, std::memory_order_acq_rel,                        \
                                  std::memory_order_acquire)
#elif !defined(                                                                                    \
    COLIBRI_RING_LOAD) /* a test brings its own, to decide which thread takes the next step */
#include <stdatomic.h>
typedef _Atomic(uint32_t) colibri_ring_count;
typedef _Atomic(void *) colibri_ring_slot;
#define COLIBRI_RING_LOAD(at, order)         atomic_load_explicit(at, memory_order_##order)
#define COLIBRI_RING_STORE(at, value, order) atomic_store_explicit(at, value, memory_order_##order)
#define COLIBRI_RING_REPLACE(at, old, value)                                                       \
    atomic_compare_exchange_strong_explicit(at, old, value, memory_order_acq_rel,                  \
                                            memory_order_acquire)
#endif

/* Owned by the caller; must not move while in use. Fields are private. Both counts wrap around: a
 * consumer errs only if exactly 2^32 other pops happen during one of its pops. */
typedef struct colibri_ring {
    colibri_ring_count pushed; /* by the producer */
    uint8_t apart[60];         /* padding: the two ends are on separate cache lines */
    colibri_ring_count popped; /* by all consumers */
    uint32_t count;
    colibri_ring_slot *slots;
} colibri_ring_t;

/* Initialise an empty ring of `count` pointers, a power of two, 1 … 2^31. `slots` must live as long
 * as the ring. Call before any thread uses it. */
static inline void colibri_ring_init(colibri_ring_t *ring, colibri_ring_slot *slots,
                                     uint32_t count) {
    ring->count = count;
    ring->slots = slots;
    COLIBRI_RING_STORE(&ring->pushed, 0, relaxed);
    COLIBRI_RING_STORE(&ring->popped, 0, relaxed);
}

/* Push `pointer`, not NULL. One thread at a time. Returns 0 if the ring is full. */
static inline int colibri_ring_push(colibri_ring_t *ring, void *pointer) {
    const uint32_t pushed = COLIBRI_RING_LOAD(&ring->pushed, relaxed);
    /* acquire: whoever took the slot's old pointer has done so before it is overwritten */
    if (pushed - COLIBRI_RING_LOAD(&ring->popped, acquire) >= ring->count) return 0;
    COLIBRI_RING_STORE(&ring->slots[pushed & (ring->count - 1)], pointer, relaxed);
    COLIBRI_RING_STORE(&ring->pushed, pushed + 1, release);
    return 1;
}

/* Pop the oldest pointer, or NULL if the ring is empty. */
static inline void *colibri_ring_pop(colibri_ring_t *ring) {
    uint32_t popped = COLIBRI_RING_LOAD(&ring->popped, acquire);
    while (popped != COLIBRI_RING_LOAD(&ring->pushed, acquire)) {
        /* Another consumer may have taken it, or the producer overwritten it: then the replacement
         * fails. */
        void *pointer = COLIBRI_RING_LOAD(&ring->slots[popped & (ring->count - 1)], relaxed);
        if (COLIBRI_RING_REPLACE(&ring->popped, &popped, popped + 1)) return pointer;
    }
    return 0;
}

#endif
