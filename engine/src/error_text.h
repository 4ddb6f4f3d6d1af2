/* Names and sentences of enum colibri_error, by value. Generated from src/colibri/spec.py. */
static const char *const error_table[17][2] = {
    {"COLIBRI_OK", "no error"},
    {"COLIBRI_ERR_NULL", "a pointer is null: pass the memory block, the model, the input and the output"},
    {"COLIBRI_ERR_MISALIGNED", "the model or the memory block is not aligned to 64 bytes: use _Alignas(64) or aligned_alloc"},
    {"COLIBRI_ERR_MAGIC", "this is not a Colibri model: the file does not start with COLIBRI; pass the exported model.bin"},
    {"COLIBRI_ERR_VERSION", "the model's format version is not this engine's: export it again with the matching package"},
    {"COLIBRI_ERR_TRUNCATED", "the model is shorter than its header says: copy or download it again"},
    {"COLIBRI_ERR_HEADER", "the model's header is corrupt: its checksum or a field is wrong; export or copy it again"},
    {"COLIBRI_ERR_CHECKSUM", "a checksum of the model does not match its content: copy it again from a good source"},
    {"COLIBRI_ERR_PROGRAM", "the model's program is not valid: an operation reaches outside its memory; export it again"},
    {"COLIBRI_ERR_TENSOR", "a tensor's place, size or layout in the model is not valid: export it again"},
    {"COLIBRI_ERR_ROUTING", "a routing descriptor of the model is not valid: export it again"},
    {"COLIBRI_ERR_EXPERT", "an entry of the model's expert directory is not valid: export it again"},
    {"COLIBRI_ERR_MEMORY", "the memory block is too small: give it colibri_model_size() bytes"},
    {"COLIBRI_ERR_TOO_LARGE", "the model does not fit this machine's address space: use a machine with 64-bit addresses"},
    {"COLIBRI_ERR_BIG_ENDIAN", "this machine is big-endian, which the model format is not: run on a little-endian machine"},
    {"COLIBRI_ERR_BATCH", "batch_size is not between 1 and the model's largest: split the batch or export with a larger one"},
    {"COLIBRI_ERR_SELFTEST", "the output is not what the model's certificate says, or it has none: the port or the memory is faulty"}
};
