/* colibri_inspect.h: checks, and errors in words. */
#include "colibri_inspect.h"

#include "../core/internal.h"

#include "../format/error_text.h"

int colibri_check(const uint8_t *model_bin, size_t size, enum colibri_depth depth) {
    clb_model m;
    const int error = clb_validate(model_bin, size, &m);
    if (error != COLIBRI_OK || depth == COLIBRI_CHECK_STRUCTURE) return error;
    const clb_header *h = m.header;
    int equal = clb_crc32(0, model_bin + h->meta_bytes, h->shared_bytes) == h->shared_crc;
    for (uint32_t n = 0; equal && n < h->experts; ++n) {
        const clb_expert *e = &m.experts[n];
        equal = clb_crc32(0, model_bin + e->offset, e->bytes) == e->crc;
    }
    if (!equal) return COLIBRI_ERR_CHECKSUM;
    return COLIBRI_OK;
}

int colibri_diagnose(const void *mem, size_t mem_size, const uint8_t *model_bin) {
    clb_model m;
    const int error = clb_validate(model_bin, UINT64_MAX, &m);
    return error != COLIBRI_OK ? error : clb_check_memory(mem, mem_size, m.header->context_bytes);
}

uint64_t colibri_worst_work(const uint8_t *model_bin) {
    const clb_header *header;
    return clb_read_header(model_bin, &header) == COLIBRI_OK ? header->worst_work : 0;
}

static int known(int error) { return error >= 0 && error < (int)CLB_COUNT(error_table); }

const char *colibri_error_name(int error) {
    return known(error) ? error_table[error][0] : "COLIBRI_ERR_UNKNOWN";
}

const char *colibri_error_text(int error) {
    return known(error) ? error_table[error][1] : "no error code of this engine";
}

const char *colibri_version(void) { return COLIBRI_VERSION; }
