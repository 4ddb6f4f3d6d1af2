/* A model's header and where its records are. */
#include "internal.h"

/* Rows of a whole batch have an address. A quarter of the address space keeps every later sum of
 * two sizes from wrapping. */
static int has_room(const clb_header *h) {
    const uint64_t most = SIZE_MAX / 4;
    const uint64_t floats = most / sizeof(float);
    const uint64_t rows = h->max_batch;
    if (h->total_bytes > most || h->context_bytes > most) return 0;
    if (rows > CLB_MAX_BATCH || rows * h->input_floats > floats) return 0;
    return rows * h->output_floats <= floats;
}

static int sizes_fit(const clb_header *h) {
    const uint64_t meta = h->meta_bytes;
    const uint64_t cleared = h->cleared_bytes;
    if (!clb_words_fit(CLB_RANGES_OF_HEADER, h) || h->main_ops > h->ops) return 0;
    if (cleared < CLB_HEAD_BYTES || cleared > h->context_bytes) return 0;
    if (meta < sizeof *h || meta > CLB_MAX_META) return 0;
    return meta <= h->total_bytes && h->shared_bytes <= h->total_bytes - meta;
}

int clb_read_header(const uint8_t *model, const clb_header **header) {
    if (model == NULL) return COLIBRI_ERR_NULL;
    if ((uintptr_t)model % CLB_ALIGN_MODEL != 0) return COLIBRI_ERR_MISALIGNED;
    if (memcmp(model, CLB_MAGIC, sizeof CLB_MAGIC) != 0) return COLIBRI_ERR_MAGIC;
    const union {
        uint16_t word;
        uint8_t first;
    } one = {1};
    if (one.first != 1) return COLIBRI_ERR_BIG_ENDIAN;
    const clb_header *h = clb_at(model, 0);
    if (h->version != CLB_FORMAT_VERSION) return COLIBRI_ERR_VERSION;
    const uint32_t crc = clb_crc32(0, model, sizeof *h - sizeof h->header_crc);
    if (crc != h->header_crc) return COLIBRI_ERR_HEADER;
    if (!has_room(h)) return COLIBRI_ERR_TOO_LARGE;
    if (!sizes_fit(h)) return COLIBRI_ERR_HEADER;
    *header = h;
    return COLIBRI_OK;
}

void clb_parse(const uint8_t *model, clb_model *m) {
    const clb_header *h = clb_at(model, 0);
    m->bytes = model;
    m->header = h;
    m->ports = clb_at(model, h->ports_offset);
    m->ops = clb_at(model, h->ops_offset);
    m->tensors = clb_at(model, h->tensors_offset);
    m->layers = clb_at(model, h->layers_offset);
    m->experts = clb_at(model, h->experts_offset);
}
