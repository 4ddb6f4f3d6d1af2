/* The cache of keys and values. They are kept in pages of CLB_PAGE positions, for each key head by
 * itself, as matrices of the layouts products know: of the keys a row is a position, of the values
 * a column is, so that scores and their weighted sum are matrix products. Positions take the pages
 * in turn. */
#ifndef COLIBRI_CACHE_H
#define COLIBRI_CACHE_H

#include "text.h"

enum {
    PAGE_BLOCKS = CLB_PAGE / CLB_LANES,
    CACHE_LAYOUT = CLB_LAYOUT_ROWS8_F32 /* of CLB_CACHE_FP32; the others follow */
};

/* The pages of one operation. */
typedef struct {
    uint8_t *at;
    uint32_t layout, key, value, heads, pages;
    /* bytes of 8 keys, of 8 elements of all values, of the keys, of all */
    size_t key_stride, value_stride, values, page;
} cache;

/* cache.c: bytes of a page of one key head */
CLB_INTERNAL uint64_t clb_page_bytes(uint32_t format, uint32_t key, uint32_t value);

CLB_STATIC_WALK cache cache_of(const clb_op *op, const clb_frame *frame) {
    const uint32_t layout = CACHE_LAYOUT + op->func;
    const size_t key_stride = (size_t)clb_block_bytes(layout, op->attention.key);
    return (cache){.at = clb_work_at(op, frame),
                   .layout = layout,
                   .key = op->attention.key,
                   .value = op->attention.value,
                   .heads = op->attention.key_heads,
                   .pages = op->attention.positions / CLB_PAGE,
                   .key_stride = key_stride,
                   .value_stride = (size_t)clb_block_bytes(layout, CLB_PAGE),
                   .values = PAGE_BLOCKS * key_stride,
                   .page =
                       (size_t)clb_page_bytes(op->func, op->attention.key, op->attention.value)};
}

static uint8_t *keys_at(const cache *c, uint32_t head, uint32_t page) {
    return c->at + ((size_t)head * c->pages + page % c->pages) * c->page;
}

/* The scales of a page's values, a number a position: int8 only. */
static float *scales_at(const cache *c, uint8_t *page) {
    return (float *)(void *)(page + c->page) - CLB_PAGE;
}

#ifndef COLIBRI_GENERATED
#include "../check/proof.h"

/* cache.c: what the proofs of both operations that know a cache share */
int clb_cache_fits(const clb_subject *s);
uint64_t clb_cache_work(const clb_subject *s);
uint64_t clb_cache_kept(const clb_subject *s);
#endif

#endif
