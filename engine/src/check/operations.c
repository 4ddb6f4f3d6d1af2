/* Every operation's proof, found by its code. What operations have in common is proven here. */
#include "proof.h"

#define DECLARE(code, name, functions, traits) extern const clb_proof clb_##name##_proof;
CLB_OPERATIONS(DECLARE)

#define ENTRY(code, name, functions, traits)                                                       \
    [CLB_OP_##code] = {&clb_##name##_proof, functions, traits},
static const struct {
    const clb_proof *proof;
    uint32_t functions, traits;
} known[] = {CLB_OPERATIONS(ENTRY)};
_Static_assert(CLB_COUNT(known) == CLB_OP_COUNT, "every operation has a proof");

int clb_has(const clb_op *op, uint32_t trait) {
    return op->code < CLB_OP_COUNT && (known[op->code].traits & trait) != 0;
}

void clb_uses(const clb_model *model, const clb_op *op, clb_use uses[CLB_OPERANDS]) {
    const clb_subject s = {.model = model, .op = op};
    uses[CLB_A] = (clb_use){.at = &op->a, .rows = op->rows};
    uses[CLB_B] = (clb_use){.at = &op->b, .rows = op->rows};
    uses[CLB_OUT] = (clb_use){.at = &op->out, .rows = op->rows};
    if (known[op->code].proof->uses != NULL) {
        known[op->code].proof->uses(&s, uses);
    } else {
        clb_plain(uses, op->row.floats, 0, op->row.floats);
    }
}

clb_cost clb_cost_of(const clb_model *model, const clb_op *op) {
    const clb_subject s = {.model = model, .op = op};
    const clb_proof *proof = known[op->code].proof;
    return (clb_cost){.macs = proof->macs == NULL ? 0 : proof->macs(&s),
                      .work = proof->work == NULL ? (uint64_t)op->rows * op->row.floats
                                                  : proof->work(&s)};
}

uint64_t clb_work_floats(const clb_model *model, const clb_op *op, uint64_t samples) {
    const clb_subject s = {.model = model, .op = op, .samples = samples};
    return known[op->code].proof->kept == NULL ? 0 : known[op->code].proof->kept(&s);
}

/* Only an operation on two values has functions around it. An exponential takes no parameter in a
 * program: kernels have one for their own use. */
static int functions_fit(const clb_op *op) {
    const int two = op->code == CLB_OP_BINARY;
    const uint32_t most = two ? CLB_UNARY_COUNT : 1;
    const uint32_t own = clb_has(op, CLB_ENDS_IN_FUNCTION) ? op->func : CLB_UNARY_IDENTITY;
    const uint32_t function = two ? op->before : own;
    if (function == CLB_UNARY_EXP && op->map.alpha != 0.0f) return 0;
    return op->func < known[op->code].functions && op->before < most && op->after < most;
}

/* The memory for an operation's own use ends where its kind of memory does. */
static int kept_fits(const clb_subject *s) {
    const clb_header *h = s->model->header;
    const uint64_t end = clb_has(s->op, CLB_KEEPS_CACHE) ? h->context_bytes : s->scope->arena_end;
    const uint64_t at = s->op->work.offset;
    const uint64_t floats = known[s->op->code].proof->kept(s);
    if (s->op->work.space != CLB_SPACE_ARENA || at % CLB_ALIGN_BUFFER != 0) return 0;
    return at >= CLB_HEAD_BYTES && at <= end && floats <= (end - at) / sizeof(float);
}

/* Whether the program may hold such an operation here. */
static int belongs(const clb_subject *s) {
    const int positions = s->model->header->context_tokens != 0;
    if (s->op->code >= CLB_OP_COUNT || s->op->rows < 1 || s->op->rows > CLB_LIMIT) return 0;
    if (clb_has(s->op, CLB_KNOWS_POSITIONS) && !positions) return 0;
    return !clb_has(s->op, CLB_RUNS_ALL_SAMPLES) || s->scope->expert == NULL;
}

int clb_op_fits(const clb_subject *s) {
    if (!belongs(s) || !functions_fit(s->op)) return 0;
    if (!clb_words_fit(s->op->code, &s->op->w0)) return 0;
    const clb_proof *proof = known[s->op->code].proof;
    if (proof->fits != NULL && !proof->fits(s)) return 0;
    return proof->kept == NULL || kept_fits(s);
}
