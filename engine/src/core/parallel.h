/* Work that is handed to the caller's threads. */
#ifndef COLIBRI_PARALLEL_H
#define COLIBRI_PARALLEL_H

#include "internal.h"

/* A task on one of the caller's threads, whose control word is whatever its owner made it. */
typedef struct {
    void (*run)(void *arg, uint32_t index);
    void *arg;
} clb_task;

static inline void clb_run_task(void *arg, uint32_t index) {
    const clb_task *task = arg;
    const clb_control found = clb_standard();
    task->run(task->arg, index);
    clb_restore(found);
}

/* Tasks 0 to below `count`, over the caller's threads where that is worth it, and where there are
 * any: a small core works alone, without the 64-bit divisions that share work out. A macro: a task
 * called by its name is folded. */
#define CLB_SPREAD(ctx, worth, task, arg, count)                                                   \
    do {                                                                                           \
        const uint32_t tasks = count;                                                              \
        if (!CLB_SCALAR && (worth) && tasks > 1) {                                                 \
            clb_task one_of_them = {task, arg};                                                    \
            (ctx)->parallel((ctx)->parallel_user, clb_run_task, &one_of_them, tasks);              \
            clb_standard(); /* a hook may have left another control word */                        \
        } else {                                                                                   \
            for (uint32_t n = 0; n < tasks; ++n) {                                                 \
                task(arg, n);                                                                      \
            }                                                                                      \
        }                                                                                          \
    } while (0)

#endif
