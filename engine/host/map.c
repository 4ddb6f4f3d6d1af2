/* A model file mapped into memory: opened and checked, guarded against what may happen to the file,
 * experts locked and released. The metadata is a copy, so that what has been checked stays true;
 * only weights come from the mapping. */
#define _GNU_SOURCE

#include "host.h"

#include "colibri_inspect.h"

#ifdef __linux__

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* File offsets agree with addresses up to this alignment, as huge pages need it. */
enum { HUGE = 1 << 21 };

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* --- the guard --- */

/* A guarded range, in static memory: the signal handler may look at it while another thread closes
 * its map. A range with end 0 guards nothing. The rest is written before `end` and stays until the
 * slot is taken anew. */
typedef struct {
    atomic_size_t begin, end;
    atomic_size_t bytes; /* the file had, at least */
    atomic_int file, damage;
    int taken; /* under the mutex */
} guard;

static guard guards[64];
enum { GUARDS = sizeof guards / sizeof guards[0] };

static pthread_mutex_t mutex =
    PTHREAD_MUTEX_INITIALIZER; /* opening and closing; the handler never waits for it */
static int guarded;            /* maps; under the mutex */
static size_t guard_page;
static struct sigaction previous; /* the handler before ours */

static int size_of(int file, uint64_t *bytes) {
    struct stat info;
    const int failed = fstat(file, &info);
    *bytes = failed ? 0 : (uint64_t)info.st_size;
    return !failed;
}

/* Put zeros where the faulting thread could not read; it then goes on. */
static int repair(guard *g, size_t at, size_t end) {
    uint64_t bytes;
    const int truncated = size_of(atomic_load(&g->file), &bytes) && bytes < atomic_load(&g->bytes);
    const size_t first = at / guard_page * guard_page;
    /* Of a shortened file everything from here on is lost: one mapping instead of thousands. */
    const size_t length = truncated ? end - first : guard_page;
    void *start = (void *)first; /* an address inside the map */
    if (mmap(start, length, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED) {
        return 0;
    }
    atomic_store(&g->damage, truncated ? COLIBRI_ERR_TRUNCATED : COLIBRI_ERR_READ_FAILED);
    return 1;
}

static void pass_on(int number, siginfo_t *info, void *machine) {
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, machine);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
    } else if (info->si_code > 0 || previous.sa_handler == SIG_DFL) {
        /* As if we were not there. The instruction faults again on return; a signal that was sent
         * is sent again. */
        signal(number, SIG_DFL);
        if (info->si_code <= 0) {
            raise(number);
        }
    }
}

/* Makes only calls that are safe in a signal handler: fstat, and mmap, which on Linux is a bare
 * system call. */
static void on_bus_error(int number, siginfo_t *info, void *machine) {
    const int saved = errno;
    const size_t at = (size_t)info->si_addr;
    for (int n = 0; info->si_code > 0 && n < GUARDS; ++n) {
        const size_t end = atomic_load(&guards[n].end);
        if (at >= atomic_load(&guards[n].begin) && at < end && repair(&guards[n], at, end)) {
            errno = saved;
            return;
        }
    }
    pass_on(number, info, machine);
    errno = saved;
}

/* Guard the mapped part of `map`; its number, or -1 where 64 maps are guarded already. */
static int guard_range(const clb_map *map) {
    int number = 0;
    pthread_mutex_lock(&mutex);
    while (number < GUARDS && guards[number].taken) {
        ++number;
    }
    if (number == GUARDS) {
        pthread_mutex_unlock(&mutex);
        errno = EMFILE;
        return -1;
    }
    guard *g = &guards[number];
    g->taken = 1;
    atomic_store(&g->file, map->file);
    atomic_store(&g->bytes, map->bytes);
    atomic_store(&g->damage, COLIBRI_OK);
    atomic_store(&g->begin, (size_t)map->model + map->copied);
    atomic_store(&g->end, (size_t)map->model + map->span);
    if (guarded++ == 0) {
        struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        guard_page = page_bytes();
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, NULL, &previous); /* known before ours can need it */
        sigaction(SIGBUS, &ours, NULL);
    }
    pthread_mutex_unlock(&mutex);
    return number;
}

static void unguard(int number) {
    pthread_mutex_lock(&mutex);
    atomic_store(&guards[number].end, 0);
    guards[number].taken = 0;
    if (--guarded == 0) {
        struct sigaction now;
        sigaction(SIGBUS, NULL, &now);
        if ((now.sa_flags & SA_SIGINFO) &&
            now.sa_sigaction == on_bus_error) { /* else someone else's is on top of ours */
            sigaction(SIGBUS, &previous, NULL);
        }
    }
    pthread_mutex_unlock(&mutex);
}

/* --- opening --- */

static int read_at_start(int file, uint8_t *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pread(file, to + done, bytes - done, (off_t)done);
        if (n == 0) return COLIBRI_ERR_TRUNCATED;
        if (n < 0 && errno != EINTR) return COLIBRI_ERR_OPEN_FAILED;
        done += n > 0 ? (size_t)n : 0;
    }
    return COLIBRI_OK;
}

/* Address space of `bytes` bytes, aligned to HUGE. */
static uint8_t *reserve(size_t bytes) {
    const size_t whole = bytes + HUGE;
    uint8_t *start =
        mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    const size_t before = align_up((size_t)start, HUGE) - (size_t)start;
    if (before > 0) {
        munmap(start, before);
    }
    munmap(start + before + bytes, HUGE - before);
    return start + before;
}

/* Copy the metadata, up to the page on which it ends, and map the rest of the file behind it. */
static int place(clb_map *m, uint64_t meta_bytes) {
    const size_t page = page_bytes();
    m->span = align_up(m->bytes, page);
    m->copied = align_up((size_t)meta_bytes, page);
    uint8_t *base = reserve(m->span);
    if (base == NULL) return COLIBRI_ERR_MMAP_FAILED;
    m->model = base;
    if (mprotect(base, m->copied, PROT_READ | PROT_WRITE) != 0) return COLIBRI_ERR_MMAP_FAILED;
    const int error = read_at_start(m->file, base, m->copied < m->bytes ? m->copied : m->bytes);
    if (error != COLIBRI_OK) return error;
    if (mprotect(base, m->copied, PROT_READ) != 0 ||
        (m->span > m->copied &&
         mmap(base + m->copied, m->span - m->copied, PROT_READ, MAP_PRIVATE | MAP_FIXED, m->file,
              (off_t)m->copied) == MAP_FAILED)) {
        return COLIBRI_ERR_MMAP_FAILED;
    }
    return COLIBRI_OK;
}

/* Where the directories are; empty ones where an unchecked model's header places them outside the
 * metadata. */
static void find_directories(clb_map *m) {
    const clb_header *h = (const clb_header *)(const void *)m->model;
    if (h->layers_offset % 8 == 0 &&
        h->layers_offset + (uint64_t)h->layers * sizeof(clb_layer) <= h->meta_bytes) {
        m->layers = (const clb_layer *)(const void *)(m->model + h->layers_offset);
        m->layer_count = h->layers;
    }
    if (h->experts_offset % 8 == 0 &&
        h->experts_offset + (uint64_t)h->experts * sizeof(clb_expert) <= h->meta_bytes) {
        m->experts = (const clb_expert *)(const void *)(m->model + h->experts_offset);
        m->expert_count = h->experts;
    }
}

static int open_model(clb_map *m, const char *path, int options) {
    _Alignas(CLB_ALIGN_MODEL) uint8_t head[sizeof(clb_header)];
    struct stat info;
    m->file =
        open(path, O_RDONLY | O_CLOEXEC |
                       O_NONBLOCK); /* so that opening a pipe does not wait for its other end */
    if (m->file < 0 || fstat(m->file, &info) != 0) return COLIBRI_ERR_OPEN_FAILED;
    if (!S_ISREG(info.st_mode)) {
        errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
        return COLIBRI_ERR_OPEN_FAILED;
    }
    m->changed[0] = info.st_mtim.tv_sec;
    m->changed[1] = info.st_mtim.tv_nsec;
    int error = read_at_start(m->file, head, sizeof head);
    if (error != COLIBRI_OK) return error;
    /* Of a sound header all there is to say is that a model does not end with it. */
    error = colibri_check(head, sizeof head, COLIBRI_CHECK_STRUCTURE);
    if (error != COLIBRI_ERR_TRUNCATED) return error;
    const clb_header *h = (const clb_header *)(const void *)head;
    if ((uint64_t)info.st_size < h->total_bytes) return COLIBRI_ERR_TRUNCATED;
    m->bytes = (size_t)h->total_bytes;
    error = place(m, h->meta_bytes);
    if (error != COLIBRI_OK) return error;
    if (memcmp(m->model, head, sizeof head) != 0) {
        return COLIBRI_ERR_CHANGED; /* the sizes above were another file's */
    }
    find_directories(m);
    if (!(options & COLIBRI_MAP_UNGUARDED)) {
        m->guard = guard_range(m);
        if (m->guard < 0) return COLIBRI_ERR_MMAP_FAILED;
    }
    if (options & COLIBRI_MAP_UNCHECKED) return COLIBRI_OK;
    error = colibri_check(m->model, m->bytes,
                          options & COLIBRI_MAP_WEIGHTS ? COLIBRI_CHECK_WEIGHTS
                                                        : COLIBRI_CHECK_STRUCTURE);
    const int status = colibri_map_status((const colibri_map_t *)(const void *)m);
    return status != COLIBRI_OK
               ? status
               : error; /* a wrong checksum of a file that changes has that reason */
}

static void close_model(clb_map *m) {
    if (m->guard >= 0) {
        unguard(m->guard);
    }
    if (m->model != NULL) {
        munmap((void *)(uintptr_t)m->model, m->span);
    }
    if (m->file >= 0) {
        close(m->file);
    }
    memset(m, 0, sizeof *m);
}

int colibri_map_open(colibri_map_t *map, const char *path, int options) {
    if (map == NULL || path == NULL) return COLIBRI_ERR_NULL;
    clb_map *m = (clb_map *)(void *)map;
    memset(m, 0, sizeof *m);
    m->file = m->guard = -1;
    const int error = open_model(m, path, options);
    if (error != COLIBRI_OK) {
        const int saved = errno;
        close_model(m);
        errno = saved;
    }
    return error;
}

const uint8_t *colibri_map_model(const colibri_map_t *map) {
    return map == NULL ? NULL : ((const clb_map *)(const void *)map)->model;
}

int colibri_map_status(const colibri_map_t *map) {
    const clb_map *m = (const clb_map *)(const void *)map;
    if (map == NULL || m->model == NULL) return COLIBRI_ERR_NULL;
    const int damage = m->guard < 0 ? COLIBRI_OK : atomic_load(&guards[m->guard].damage);
    if (damage != COLIBRI_OK) return damage;
    struct stat info;
    if (fstat(m->file, &info) != 0) return COLIBRI_ERR_READ_FAILED;
    if ((uint64_t)info.st_size <
        m->bytes) { /* the rest of a page that the file ends on reads as zeros without a fault */
        return COLIBRI_ERR_TRUNCATED;
    }
    return info.st_mtim.tv_sec != m->changed[0] || info.st_mtim.tv_nsec != m->changed[1]
               ? COLIBRI_ERR_CHANGED
               : COLIBRI_OK;
}

void colibri_map_close(colibri_map_t *map) {
    clb_map *m = (clb_map *)(void *)map;
    if (map != NULL && m->model != NULL) {
        close_model(m);
    }
}

/* --- experts' memory --- */

clb_pages clb_expert_pages(const clb_map *map, const clb_expert *e) {
    /* Experts packed closely may begin, or lie, on the last page of the copy, which stays in memory
     * anyway. */
    if (e->offset > map->bytes || e->bytes > map->bytes - e->offset ||
        e->offset + e->bytes <= map->copied) {
        return (clb_pages){0};
    }
    const size_t page = page_bytes();
    const size_t from = (size_t)e->offset / page * page;
    const size_t begin = from < map->copied ? map->copied : from;
    return (clb_pages){(uint8_t *)(uintptr_t)map->model + begin,
                       align_up((size_t)(e->offset + e->bytes), page) - begin};
}

typedef int per_expert(clb_map *m, clb_pages pages);

static int for_each(colibri_map_t *map, const int32_t *experts, int count, colibri_progress_t *done,
                    per_expert *act) {
    clb_map *m = (clb_map *)(void *)map;
    colibri_progress_t progress = {0};
    int error = map == NULL || m->model == NULL || experts == NULL ? COLIBRI_ERR_NULL : COLIBRI_OK;
    while (error == COLIBRI_OK && progress.experts < count) {
        const int32_t number = experts[progress.experts];
        if (number < 0 || (uint32_t)number >= m->expert_count) {
            error = COLIBRI_ERR_NO_EXPERT;
            break;
        }
        const clb_pages pages = clb_expert_pages(m, &m->experts[number]);
        error = pages.bytes == 0 ? COLIBRI_OK : act(m, pages);
        if (error == COLIBRI_OK) {
            ++progress.experts;
            progress.bytes += pages.bytes;
        }
    }
    if (done != NULL) {
        *done = progress;
    }
    return error;
}

static int lock_pages(clb_map *m, clb_pages pages) {
    if (mlock(pages.at, pages.bytes) == 0) return COLIBRI_OK;
    const int reason = errno;
    uint64_t bytes;
    struct rlimit limit;
    munlock(pages.at, pages.bytes); /* some of them may be */
    if (size_of(m->file, &bytes) && bytes < m->bytes) return COLIBRI_ERR_TRUNCATED;
    const int limited = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return limited && (reason == ENOMEM || reason == EPERM) ? COLIBRI_ERR_LOCK_LIMIT
                                                            : COLIBRI_ERR_LOCK_FAILED;
}

static int unlock_pages(clb_map *m, clb_pages pages) {
    (void)m;
    return munlock(pages.at, pages.bytes) == 0 ? COLIBRI_OK : COLIBRI_ERR_LOCK_FAILED;
}

/* The page cache keeps pages in blocks of up to HUGE bytes, and gives up whole ones that nobody
 * maps. */
static int release_pages(clb_map *m, clb_pages pages) {
    const size_t offset = (size_t)(pages.at - m->model);
    const size_t first = offset / HUGE * HUGE;
    const off_t length = (off_t)(align_up(offset + pages.bytes, HUGE) - first);
    return madvise(pages.at, pages.bytes, MADV_DONTNEED) == 0 &&
                   posix_fadvise(m->file, (off_t)first, length, POSIX_FADV_DONTNEED) == 0
               ? COLIBRI_OK
               : COLIBRI_ERR_RELEASE_FAILED;
}

int colibri_map_lock(colibri_map_t *map, const int32_t *experts, int count,
                     colibri_progress_t *done) {
    return for_each(map, experts, count, done, lock_pages);
}

int colibri_map_unlock(colibri_map_t *map, const int32_t *experts, int count,
                       colibri_progress_t *done) {
    return for_each(map, experts, count, done, unlock_pages);
}

int colibri_map_release(colibri_map_t *map, const int32_t *experts, int count,
                        colibri_progress_t *done) {
    return for_each(map, experts, count, done, release_pages);
}

/* The kernel accepts the advice even where it will never follow it. */
static int huge_pages_are_off(void) {
    char modes[64] = "";
    const int file = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        const ssize_t n = read(file, modes, sizeof modes - 1);
        modes[n > 0 ? n : 0] = 0;
        close(file);
    }
    return strstr(modes, "[never]") != NULL || prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1;
}

int colibri_map_huge_pages(colibri_map_t *map) {
    const clb_map *m = (const clb_map *)(const void *)map;
    if (map == NULL || m->model == NULL) return COLIBRI_ERR_NULL;
    uint8_t *weights = (uint8_t *)(uintptr_t)m->model + m->copied;
    const int refused =
        m->span > m->copied && madvise(weights, m->span - m->copied, MADV_HUGEPAGE) != 0;
    return refused || huge_pages_are_off() ? COLIBRI_ERR_HUGE_PAGES : COLIBRI_OK;
}

#else

int colibri_map_open(colibri_map_t *map, const char *path, int options) {
    (void)path;
    (void)options;
    if (map != NULL) {
        *map = (colibri_map_t){{0}};
    }
    return COLIBRI_ERR_UNSUPPORTED;
}

const uint8_t *colibri_map_model(const colibri_map_t *map) {
    (void)map;
    return NULL;
}

int colibri_map_status(const colibri_map_t *map) {
    (void)map;
    return COLIBRI_ERR_UNSUPPORTED;
}

void colibri_map_close(colibri_map_t *map) { (void)map; }

static int unsupported(colibri_progress_t *done) {
    if (done != NULL) {
        *done = (colibri_progress_t){0};
    }
    return COLIBRI_ERR_UNSUPPORTED;
}

int colibri_map_lock(colibri_map_t *map, const int32_t *experts, int count,
                     colibri_progress_t *done) {
    (void)map;
    (void)experts;
    (void)count;
    return unsupported(done);
}

int colibri_map_unlock(colibri_map_t *map, const int32_t *experts, int count,
                       colibri_progress_t *done) {
    return colibri_map_lock(map, experts, count, done);
}

int colibri_map_release(colibri_map_t *map, const int32_t *experts, int count,
                        colibri_progress_t *done) {
    return colibri_map_lock(map, experts, count, done);
}

int colibri_map_huge_pages(colibri_map_t *map) {
    (void)map;
    return COLIBRI_ERR_UNSUPPORTED;
}

#endif
