/* Colibri, optional: a ring that hands over pointers from one thread to several, without locks,
 * copies or system calls: tokens to the threads that run experts, experts to the threads that fetch
 * them. Header only, C11 or C++11; the engine knows nothing of it.
 *
 *     static colibri_ring_slot slots[256];
 *     colibri_ring_t ring;
 *     colibri_ring_init(&ring, slots, 256);
 *     if (!colibri_ring_push(&ring, token)) { … } // the one producer: full, so do the work here
 *     while ((token = colibri_ring_pop(&ring))) { … }     // any number of consumers
 *
 * What the producer wrote before the push, a consumer sees after the pop. Results come back the
 * same way, through a ring each consumer is the producer of. Every pointer comes out once; each
 * consumer gets its own in the order of the pushes. Neither side ever waits for the other: a
 * producer or consumer that stops amid a call stops nobody else.
 *
 * COLIBRI_RING_SINGLE, or a compiler without atomics, makes plain loads and stores of it: for one
 * thread. */
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

/* The caller's; must not move while in use. Fields are the ring's own. Both counts run on and wrap
 * around: a consumer would have to sleep amid a pop through exactly 2^32 others to be mistaken. */
typedef struct colibri_ring {
    colibri_ring_count pushed; /* by the producer */
    uint8_t apart[60];         /* the two ends on cache lines of their own */
    colibri_ring_count popped; /* by all consumers */
    uint32_t count;
    colibri_ring_slot *slots;
} colibri_ring_t;

/* An empty ring of `count` pointers: a power of two, 1 … 2^31. `slots` must live as long. Before
 * any thread uses it. */
static inline void colibri_ring_init(colibri_ring_t *ring, colibri_ring_slot *slots,
                                     uint32_t count) {
    ring->count = count;
    ring->slots = slots;
    COLIBRI_RING_STORE(&ring->pushed, 0, relaxed);
    COLIBRI_RING_STORE(&ring->popped, 0, relaxed);
}

/* Hand over `pointer`, not NULL. One thread at a time. Returns 0 where the ring is full. */
static inline int colibri_ring_push(colibri_ring_t *ring, void *pointer) {
    const uint32_t pushed = COLIBRI_RING_LOAD(&ring->pushed, relaxed);
    /* acquire: whoever took the slot's old pointer has done so before it is overwritten */
    if (pushed - COLIBRI_RING_LOAD(&ring->popped, acquire) >= ring->count) return 0;
    COLIBRI_RING_STORE(&ring->slots[pushed & (ring->count - 1)], pointer, relaxed);
    COLIBRI_RING_STORE(&ring->pushed, pushed + 1, release);
    return 1;
}

/* The oldest pointer, or NULL where the ring is empty. */
static inline void *colibri_ring_pop(colibri_ring_t *ring) {
    uint32_t popped = COLIBRI_RING_LOAD(&ring->popped, acquire);
    while (popped != COLIBRI_RING_LOAD(&ring->pushed, acquire)) {
        /* May be another's by now, even overwritten: then the replacement fails. */
        void *pointer = COLIBRI_RING_LOAD(&ring->slots[popped & (ring->count - 1)], relaxed);
        if (COLIBRI_RING_REPLACE(&ring->popped, &popped, popped + 1)) return pointer;
    }
    return 0;
}

#endif
