/* A model's header and where its records are. */
#include "internal.h"

/* All of n values are from `least` to `most`. */
int clb_within(const uint32_t *values, size_t n, uint32_t least, uint32_t most) {
    for (size_t i = 0; i < n; ++i) {
        if (values[i] < least || values[i] > most) return 0;
    }
    return 1;
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
    const clb_header *h = (const clb_header *)(const void *)model;
    if (h->version != CLB_FORMAT_VERSION) return COLIBRI_ERR_VERSION;
    if (clb_crc32(model, sizeof *h - sizeof h->header_crc) != h->header_crc) {
        return COLIBRI_ERR_HEADER;
    }
    /* A quarter of the address space keeps every later sum of two sizes from wrapping. */
    const uint64_t most = SIZE_MAX / 4;
    if (h->total_bytes > most || h->context_bytes > most || h->max_batch > CLB_MAX_BATCH ||
        (uint64_t)h->max_batch * h->input_floats > most / sizeof(float) ||
        (uint64_t)h->max_batch * h->output_floats > most / sizeof(float)) {
        return COLIBRI_ERR_TOO_LARGE;
    }
    if (h->cleared_bytes < CLB_HEAD_BYTES || h->cleared_bytes > h->context_bytes) {
        return COLIBRI_ERR_HEADER;
    }
    if (h->max_batch < 1 || h->input_floats < 1 || h->output_floats < 1 || h->inputs < 1 ||
        h->outputs < 1 || h->experts > CLB_LIMIT || h->main_ops > h->ops ||
        h->context_tokens > CLB_LIMIT ||
        !clb_within(h->reserved, sizeof h->reserved / sizeof h->reserved[0], 0, 0) ||
        h->meta_bytes < sizeof *h || h->meta_bytes > CLB_MAX_META ||
        h->meta_bytes > h->total_bytes || h->shared_bytes > h->total_bytes - h->meta_bytes) {
        return COLIBRI_ERR_HEADER;
    }
    *header = h;
    return COLIBRI_OK;
}

void clb_parse(const uint8_t *model, clb_model *m) {
    const clb_header *h = (const clb_header *)(const void *)model;
    m->bytes = model;
    m->header = h;
    m->ports = (const clb_port *)(const void *)(model + h->ports_offset);
    m->ops = (const clb_op *)(const void *)(model + h->ops_offset);
    m->tensors = (const clb_tensor *)(const void *)(model + h->tensors_offset);
    m->layers = (const clb_layer *)(const void *)(model + h->layers_offset);
    m->experts = (const clb_expert *)(const void *)(model + h->experts_offset);
}
