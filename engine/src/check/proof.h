/* What a proof is made of. Each operation has one beside its kernel: which sizes it takes, what it
 * reads, writes and keeps, and what it costs; operations.c finds it by the operation's code.
 * Generated code needs none. */
#ifndef COLIBRI_PROOF_H
#define COLIBRI_PROOF_H

#include "../core/internal.h"

/* An operand as its operation uses it. A row is `floats` neighbouring floats, or has axes and
 * reaches that far. */
enum { CLB_A, CLB_B, CLB_OUT, CLB_OPERANDS, CLB_AXES = 4, CLB_ALL_AXES = 0xF };
typedef struct {
    const clb_operand *at;
    const uint32_t *dims, *strides; /* of the axes */
    uint64_t floats;                /* 0: there is no such operand */
    uint64_t spare;                 /* the last of these, if their values do not count */
    uint32_t axes;                  /* the bits of those that count; 0: neighbouring floats */
    uint32_t rows;
    uint32_t cols; /* inputs of rows that are quantised; 0: they are floats */
} clb_use;

/* What an operation may touch: the whole model, or, where `expert` is set, one expert on a tile of
 * tokens. Of the arena its operands lie between `arena` and `arena_end`: of the main program in
 * what is cleared, of an expert in its layer's scratch memory, behind the indices that the layer
 * follows while its experts run. */
typedef struct {
    const clb_model *model;
    const clb_expert *expert;
    uint64_t samples, arena, arena_end;
    uint32_t steps, looped; /* of the loop that is open: steps, and operations still to come */
    int early;              /* before the tail, whose rows alone the caller's output may hold */
    int decodes;            /* there is a source text, and it has been read */
} clb_scope;

/* An operation that is proven. */
typedef struct {
    const clb_model *model;
    const clb_op *op;
    uint64_t samples;
    /* only what `fits` is handed has this, and the tensors that it names, proven to be in its
     * scope; NULL: none */
    const clb_scope *scope;
    const clb_tensor *w0, *w1, *w2;
} clb_subject;

/* What is known of an operation. NULL: its ranges are all there is to prove; a row of dims[0]
 * floats becomes another; it has no multiply-accumulates; as many elementary steps as floats; it
 * keeps nothing. */
typedef struct {
    int (*fits)(const clb_subject *s); /* sizes, beyond their ranges, and tensors */
    /* operands of what fits, their places unproven */
    void (*uses)(const clb_subject *s, clb_use uses[CLB_OPERANDS]);
    /* on one sample, at the end of a text that fills the context */
    uint64_t (*macs)(const clb_subject *s);
    uint64_t (*work)(const clb_subject *s); /* likewise, elementary steps */
    uint64_t (*kept)(const clb_subject *s); /* floats for its own use, for all samples */
} clb_proof;

/* Multiply-accumulates, all elementary steps, and bytes of experts that are read, along the
 * costliest route. */
typedef struct {
    uint64_t macs, work, bytes;
} clb_cost;

/* measure.c: `size` bytes or records from `at` on lie between `begin` and `end` */
int clb_inside(uint64_t at, uint64_t size, uint64_t begin, uint64_t end);

/* measure.c: sums and products that stop at UINT64_MAX, which no sound model reaches */
uint64_t clb_plus(uint64_t a, uint64_t b);
uint64_t clb_times(uint64_t a, uint64_t b);

/* measure.c: a tensor is a vector of n floats, or there is none; axes are row-major and apart, so
 * that every element is written once and the work is bounded by the memory */
int clb_is_vector(const clb_tensor *t, uint32_t n);
int clb_apart(const uint32_t *dims, const uint32_t *strides);

/* measure.c: operands of neighbouring floats; one with axes */
void clb_plain(clb_use uses[CLB_OPERANDS], uint64_t a, uint64_t b, uint64_t out);
void clb_strided(clb_use *u, const clb_op *op, const uint32_t *strides, uint32_t axes);

/* operations.c: an operation's proof, by its code */
void clb_uses(const clb_model *model, const clb_op *op, clb_use uses[CLB_OPERANDS]);
clb_cost clb_cost_of(const clb_model *model, const clb_op *op);
uint64_t clb_work_floats(const clb_model *model, const clb_op *op, uint64_t samples);
int clb_op_fits(const clb_subject *s);
int clb_has(const clb_op *op, uint32_t trait);

/* moe.c: up to where the experts' scratch memory begins; routing.c: a layer's descriptor */
uint64_t clb_workspace_floats(const clb_op *op, const clb_layer *layer, uint64_t samples);
int clb_layer_fits(const clb_header *h, const clb_layer *l, uint32_t first_expert);

/* operand.c: whether operations write where an operand is; a tensor's own consistency, and its
 * place inside `bytes` bytes from `first`; an operation with all that it names, reads, writes and
 * keeps */
int clb_tensor_fits(const clb_tensor *t, uint64_t first, uint64_t bytes);
int clb_is_written(const clb_operand *v);
int clb_operation_fits(const clb_scope *s, const clb_op *op);

/* program.c: the main program and those of the experts; counts the choices one sample makes */
int clb_program_fits(const clb_model *m, uint64_t *choices);

/* order.c: whether a valid program reads only what it has written */
int clb_in_order(const clb_model *model);

/* cache.c: whether every attention's cache is filled by an operation before it, and nothing else is
 * kept there */
int clb_caches_are_filled(const clb_model *model);

#endif
