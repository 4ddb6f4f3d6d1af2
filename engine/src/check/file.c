/* Proves a model file once, so that running it needs no checks: every offset, size, alignment,
 * dimension and enumeration, and that no operation can reach outside its memory. Trusts nothing but
 * the bytes it has been given. */
#include "proof.h"

/* The sections of the metadata: what they take together, and whether each lies inside. */
typedef struct {
    const clb_header *header;
    uint64_t bytes;
    int inside;
} sections;

/* `count` records of `size` bytes, aligned for their 64-bit fields. */
static void section(sections *s, uint32_t offset, uint64_t count, uint64_t size) {
    const uint64_t bytes = clb_times(count, size);
    s->bytes = clb_plus(s->bytes, bytes + 7);
    s->inside &= offset % 8 == 0;
    s->inside &= clb_inside(offset, bytes, sizeof(clb_header), s->header->meta_bytes);
}

/* Nothing else lies in the metadata but what aligns it. */
static int sections_fit(const clb_header *h) {
    sections s = {h, sizeof *h, 1};
    section(&s, h->ports_offset, (uint64_t)h->inputs + h->outputs, sizeof(clb_port));
    section(&s, h->ops_offset, h->ops, sizeof(clb_op));
    section(&s, h->tensors_offset, h->tensors, sizeof(clb_tensor));
    section(&s, h->layers_offset, h->layers, sizeof(clb_layer));
    section(&s, h->experts_offset, h->experts, sizeof(clb_expert));
    section(&s, h->golden_offset, h->golden_rows, h->golden_bytes);
    section(&s, h->info_offset, h->info_bytes, 1);
    return s.inside && h->meta_bytes <= s.bytes + CLB_ALIGN_MODEL;
}

/* Bytes of the UTF-8 character at `at`; 0 where it is none, or a control character. A zero ends it,
 * so that nothing behind one is looked at. */
static uint32_t character(const uint8_t *at) {
    const uint8_t first = at[0];
    if (first < 0x80) return first >= 0x20 && first != 0x7F;
    if (first < 0xC2 || first > 0xF4) return 0;
    const uint8_t least = first == 0xF0 ? 0x90 : first == 0xC2 || first == 0xE0 ? 0xA0 : 0x80;
    const uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (at[1] < least || at[1] > most) return 0;
    const uint32_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    for (uint32_t n = 2; n < bytes; ++n) {
        if ((at[n] & 0xC0) != 0x80) return 0;
    }
    return bytes;
}

/* A name, and zeros behind it. */
static int name_fits(const uint8_t *name, uint32_t bytes) {
    uint32_t at = 0;
    if (name[0] == 0 || name[bytes - 1] != 0) return 0;
    while (name[at] != 0) {
        const uint32_t step = character(name + at);
        if (step == 0) return 0;
        at += step;
    }
    while (at < bytes && name[at] == 0) {
        ++at;
    }
    return at == bytes;
}

/* `count` ports, which have `floats` floats together. */
static int ports_fit(const clb_port *ports, uint32_t count, uint64_t floats) {
    for (uint32_t n = 0; n < count; ++n) {
        const clb_port *port = &ports[n];
        uint64_t product = 1;
        if (!name_fits(port->name, sizeof port->name)) return 0;
        if (!clb_words_fit(CLB_RANGES_OF_PORT, port)) return 0;
        for (uint32_t axis = 0; axis < port->rank; ++axis) {
            product = clb_times(product, port->dims[axis]);
        }
        if (product == 0 || product > CLB_LIMIT || product > floats) return 0;
        if (port->floats != product) return 0;
        floats -= product;
    }
    return floats == 0;
}

static int expert_fits(const clb_header *h, const clb_expert *e, uint32_t layer) {
    const uint64_t weights = h->meta_bytes + h->shared_bytes;
    const int weighed = clb_inside(e->offset, e->bytes, weights, h->total_bytes);
    const int pruned = e->bytes == 0 && e->macs == 0;
    if (!clb_words_fit(CLB_RANGES_OF_EXPERT, e) || e->layer != layer) return 0;
    if (!weighed || e->offset % CLB_ALIGN_MODEL != 0) return 0;
    if (!clb_inside(e->first_op, e->ops, h->main_ops, h->ops)) return 0;
    if (e->ops == 0 && !pruned) return 0;
    return e->frequency >= 0.0f && e->frequency <= 1.0f;
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
static NOINLINE int structure(const uint8_t *model, uint64_t size, clb_model *m) {
    if (model != NULL && size < sizeof(clb_header)) return COLIBRI_ERR_TRUNCATED;
    const clb_header *h;
    const int error = clb_read_header(model, &h);
    if (error != COLIBRI_OK) return error;
    if (size < h->total_bytes) return COLIBRI_ERR_TRUNCATED;
    if (!sections_fit(h)) return COLIBRI_ERR_HEADER;
    if (clb_crc32(0, model + sizeof *h, h->meta_bytes - sizeof *h) != h->meta_crc) {
        return COLIBRI_ERR_CHECKSUM;
    }
    clb_parse(model, m);
    const clb_port *outputs = m->ports + h->inputs;
    if (!ports_fit(m->ports, h->inputs, h->input_floats)) return COLIBRI_ERR_HEADER;
    if (!ports_fit(outputs, h->outputs, h->output_floats)) return COLIBRI_ERR_HEADER;
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
