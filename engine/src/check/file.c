/* Proves a model file once, so that running it needs no checks: every offset, size, alignment,
 * dimension and enumeration, and that no operation can reach outside its memory. Trusts nothing but
 * the bytes it has been given. */
#include "proof.h"

/* `count` records of `size` bytes lie inside the metadata, aligned for their 64-bit fields;
 * `*whole` counts these bytes. */
static int section(const clb_header *h, uint32_t offset, uint64_t count, uint64_t size,
                   uint64_t *whole) {
    *whole = clb_plus(*whole, clb_times(count, size) + 7);
    return offset >= sizeof *h && offset % 8 == 0 && offset <= h->meta_bytes &&
           count * size <= h->meta_bytes - offset;
}

/* UTF-8 without control characters, zero-padded. A lead byte must have its trail; overlong forms
 * have no way past it. */
static int name_fits(const uint8_t *name, uint32_t bytes) {
    uint32_t at = 0;
    if (name[0] == 0 || name[bytes - 1] != 0) return 0;
    while (name[at] != 0) {
        const uint8_t first = name[at++];
        const uint8_t next = name[at];
        const uint32_t trail = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0x80 ? 1 : 0;
        const int low = (first == 0xC2 || first == 0xE0 || first == 0xF0) &&
                        next < (first == 0xF0 ? 0x90 : 0xA0);
        const int high = (first == 0xED && next >= 0xA0) || (first == 0xF4 && next >= 0x90);
        if (first < 0x20 || (first >= 0x7F && first < 0xC2) || first > 0xF4 || low || high) {
            return 0;
        }
        for (const uint32_t end = at + trail; at < end; ++at) {
            if ((name[at] & 0xC0) != 0x80) {
                return 0;
            } /* as a zero is, so that nothing behind it is looked at */
        }
    }
    for (; at < bytes && name[at] == 0; ++at) {
    }
    return at == bytes;
}

static int ports(const clb_port *port, uint32_t count, uint64_t floats) {
    for (uint32_t n = 0; n < count; ++n) {
        uint64_t product = 1;
        if (!name_fits(port[n].name, sizeof port[n].name)) return 0;
        if (port[n].rank > 6 || !clb_within(port[n].dims, port[n].rank, 1, CLB_LIMIT)) return 0;
        for (uint32_t axis = 0; axis < port[n].rank && product <= CLB_LIMIT; ++axis) {
            product *= port[n].dims[axis];
        }
        if (port[n].floats != product || product > CLB_LIMIT || product > floats) return 0;
        floats -= product;
    }
    return floats == 0;
}

static int expert_fits(const clb_header *h, const clb_expert *e, uint32_t layer) {
    return e->layer == layer && e->offset % CLB_ALIGN_MODEL == 0 &&
           e->offset >= h->meta_bytes + h->shared_bytes && e->offset <= h->total_bytes &&
           e->bytes <= h->total_bytes - e->offset && e->first_op >= h->main_ops &&
           e->first_op <= h->ops && e->ops <= h->ops - e->first_op &&
           (e->ops >= 1 || (e->bytes == 0 && e->macs == 0)) && e->frequency >= 0.0f &&
           e->frequency <= 1.0f && clb_within(e->reserved, 4, 0, 0);
}

static int certificate_fits(const clb_model *m, uint64_t choices) {
    const clb_header *h = m->header;
    const uint64_t bytes =
        sizeof(clb_golden) + (uint64_t)h->input_floats * sizeof(float) + (choices + 1) / 2 * 4;
    for (uint32_t n = 0; n < h->golden_rows; ++n) {
        if (h->golden_bytes != bytes) return 0;
        const uint8_t *row = m->bytes + h->golden_offset + (uint64_t)n * bytes;
        if (((const clb_golden *)(const void *)row)->choices != choices) return 0;
    }
    return 1;
}

/* By itself, for its stack need not stay for the proof of the order. */
static __attribute__((noinline)) int structure(const uint8_t *model, uint64_t size, clb_model *m) {
    if (model != NULL && size < sizeof(clb_header)) return COLIBRI_ERR_TRUNCATED;
    const clb_header *h;
    const int error = clb_read_header(model, &h);
    if (error != COLIBRI_OK) return error;
    if (size < h->total_bytes) return COLIBRI_ERR_TRUNCATED;
    uint64_t whole = sizeof *h; /* nothing else lies in the metadata but what aligns it */
    if (!section(h, h->ports_offset, (uint64_t)h->inputs + h->outputs, sizeof(clb_port), &whole) ||
        !section(h, h->ops_offset, h->ops, sizeof(clb_op), &whole) ||
        !section(h, h->tensors_offset, h->tensors, sizeof(clb_tensor), &whole) ||
        !section(h, h->layers_offset, h->layers, sizeof(clb_layer), &whole) ||
        !section(h, h->experts_offset, h->experts, sizeof(clb_expert), &whole) ||
        !section(h, h->golden_offset, h->golden_rows, h->golden_bytes, &whole) ||
        !section(h, h->info_offset, h->info_bytes, 1, &whole) ||
        h->meta_bytes > whole + CLB_ALIGN_MODEL) {
        return COLIBRI_ERR_HEADER;
    }
    if (clb_crc32(model + sizeof *h, h->meta_bytes - sizeof *h) != h->meta_crc) {
        return COLIBRI_ERR_CHECKSUM;
    }
    clb_parse(model, m);
    if (!ports(m->ports, h->inputs, h->input_floats) ||
        !ports(m->ports + h->inputs, h->outputs, h->output_floats)) {
        return COLIBRI_ERR_HEADER;
    }
    for (uint32_t n = 0; n < h->tensors; ++n) {
        const clb_tensor *t = &m->tensors[n];
        if (t->scope >= CLB_SCOPE_COUNT ||
            (t->scope == CLB_SCOPE_SHARED && !clb_tensor_fits(t, h->meta_bytes, h->shared_bytes))) {
            return COLIBRI_ERR_TENSOR;
        }
    }
    uint32_t first = 0;
    for (uint32_t n = 0; n < h->layers; ++n) {
        if (!clb_layer_fits(h, &m->layers[n], first)) return COLIBRI_ERR_ROUTING;
        for (uint32_t e = 0; e < m->layers[n].experts; ++e) {
            if (!expert_fits(h, &m->experts[first + e], n)) return COLIBRI_ERR_EXPERT;
        }
        first += m->layers[n].experts;
    }
    uint64_t choices;
    if (first != h->experts) return COLIBRI_ERR_EXPERT;
    if (!clb_program_fits(m, &choices)) return COLIBRI_ERR_PROGRAM;
    return certificate_fits(m, choices) ? COLIBRI_OK : COLIBRI_ERR_HEADER;
}

int clb_validate(const uint8_t *model, uint64_t size, clb_model *m) {
    const int error = structure(model, size, m);
    if (error != COLIBRI_OK) return error;
    return clb_in_order(m) ? COLIBRI_OK : COLIBRI_ERR_ORDER;
}
