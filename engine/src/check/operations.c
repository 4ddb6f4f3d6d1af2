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
_Static_assert(sizeof known / sizeof known[0] == CLB_OP_COUNT, "every operation has a proof");

uint32_t clb_traits(const clb_op *op) {
    return op->code < CLB_OP_COUNT ? known[op->code].traits : 0;
}

void clb_uses(const clb_model *model, const clb_op *op, clb_use uses[CLB_OPERANDS]) {
    const clb_subject s = {.model = model, .op = op};
    uses[CLB_A] = (clb_use){.at = &op->a, .rows = op->rows};
    uses[CLB_B] = (clb_use){.at = &op->b, .rows = op->rows};
    uses[CLB_OUT] = (clb_use){.at = &op->out, .rows = op->rows};
    if (known[op->code].proof->uses != NULL) {
        known[op->code].proof->uses(&s, uses);
    } else {
        clb_plain(uses, op->dims[0], 0, op->dims[0]);
    }
}

clb_cost clb_cost_of(const clb_model *model, const clb_op *op) {
    const clb_subject s = {.model = model, .op = op};
    const clb_proof *proof = known[op->code].proof;
    return (clb_cost){.macs = proof->macs == NULL ? 0 : proof->macs(&s),
                      .work =
                          proof->work == NULL ? (uint64_t)op->rows * op->dims[0] : proof->work(&s)};
}

uint64_t clb_work_floats(const clb_model *model, const clb_op *op, uint64_t samples) {
    const clb_subject s = {.model = model, .op = op, .samples = samples};
    return known[op->code].proof->kept == NULL ? 0 : known[op->code].proof->kept(&s);
}

/* Only an operation on two values has functions around it. An exponential takes no parameter in a
 * program: kernels have one for their own use. */
static int functions_fit(const clb_op *op) {
    const int two = op->code == CLB_OP_MAP2;
    const uint32_t most = two ? CLB_UNARY_COUNT : 1;
    const int one = (clb_traits(op) & CLB_ENDS_IN_FUNCTION) != 0;
    const uint32_t function = two ? op->before : one ? op->func : CLB_UNARY_IDENTITY;
    const int parameter = function == CLB_UNARY_EXP && op->alpha != 0.0f;
    if (parameter || op->func >= known[op->code].functions) return 0;
    return op->before < most && op->after < most;
}

/* The memory for an operation's own use ends where its kind of memory does. */
static int kept_fits(const clb_subject *s) {
    const uint64_t end = (clb_traits(s->op) & CLB_KEEPS_CACHE) != 0
                             ? s->model->header->context_bytes
                             : s->scope->arena_end;
    const uint64_t at = s->op->work.offset;
    if (s->op->work.space != CLB_SPACE_ARENA || at % CLB_ALIGN_BUFFER != 0) return 0;
    return at >= CLB_HEAD_BYTES && at <= end &&
           known[s->op->code].proof->kept(s) <= (end - at) / sizeof(float);
}

int clb_op_fits(const clb_subject *s) {
    const int nowhere =
        (clb_traits(s->op) & CLB_KNOWS_POSITIONS) != 0 && s->model->header->context_tokens == 0;
    const int inside = (clb_traits(s->op) & CLB_RUNS_ALL_SAMPLES) != 0 && s->scope->expert != NULL;
    if (s->op->code >= CLB_OP_COUNT || nowhere || inside) return 0;
    const clb_proof *proof = known[s->op->code].proof;
    if (!clb_within(&s->op->rows, 1, 1, CLB_LIMIT) || !functions_fit(s->op) ||
        !clb_words_fit(s->op->code, &s->op->w0)) {
        return 0;
    }
    return (proof->fits == NULL || proof->fits(s)) && (proof->kept == NULL || kept_fits(s));
}
