/* Names and sentences of enum colibri_error, by value. Generated from src/colibri/format/spec.py. */
static const char *const error_table[45][2] = {
    {"COLIBRI_OK", "no error"},
    {"COLIBRI_ERR_NULL",
     "a pointer is null: pass the memory block, the model, the input and the output"},
    {"COLIBRI_ERR_MISALIGNED", "the model or the memory block is not aligned to 64 bytes, or a row "
                               "not to 4: use aligned_alloc"},
    {"COLIBRI_ERR_MAGIC", "this is not a Colibri model: the file does not start with COLIBRI; pass "
                          "the exported model.bin"},
    {"COLIBRI_ERR_VERSION",
     "the model's format version is not this engine's: export it again with the matching package"},
    {"COLIBRI_ERR_TRUNCATED",
     "the model is shorter than its header says: copy or download it again"},
    {"COLIBRI_ERR_HEADER",
     "the model's header is corrupt: its checksum or a field is wrong; export or copy it again"},
    {"COLIBRI_ERR_CHECKSUM",
     "a checksum of the model does not match its content: copy it again from a good source"},
    {"COLIBRI_ERR_PROGRAM", "the model's program is not valid: an operation reaches outside its "
                            "memory or costs more than stated; export it again"},
    {"COLIBRI_ERR_TENSOR",
     "a tensor's place, size or layout in the model is not valid: export it again"},
    {"COLIBRI_ERR_ROUTING", "a routing descriptor of the model is not valid: export it again"},
    {"COLIBRI_ERR_EXPERT",
     "an entry of the model's expert directory is not valid: export it again"},
    {"COLIBRI_ERR_MEMORY", "the memory block is too small: give it colibri_model_size() bytes"},
    {"COLIBRI_ERR_TOO_LARGE",
     "the model does not fit this machine's address space: use a machine with 64-bit addresses"},
    {"COLIBRI_ERR_BIG_ENDIAN",
     "this machine is big-endian, which the model format is not: run on a little-endian machine"},
    {"COLIBRI_ERR_BATCH", "batch_size is not between 1 and the model's largest: split the batch or "
                          "export with a larger one"},
    {"COLIBRI_ERR_SELFTEST", "the output is not what the model's certificate says, or it has none: "
                             "the port or the memory is faulty"},
    {"COLIBRI_ERR_OPEN_FAILED", "the model file cannot be opened or read: check path, permissions "
                                "and that it is a regular file"},
    {"COLIBRI_ERR_MMAP_FAILED",
     "the system does not map the model: free address space, or close one of 64 guarded maps"},
    {"COLIBRI_ERR_CHANGED", "the model file was changed while it was mapped: open it again; "
                            "replace model files by renaming"},
    {"COLIBRI_ERR_READ_FAILED",
     "the medium cannot read a mapped page of the model: check the disk and copy the model again"},
    {"COLIBRI_ERR_NO_EXPERT",
     "the model has no expert of this number: pass 0 to colibri_get_num_experts() - 1"},
    {"COLIBRI_ERR_LOCK_LIMIT", "the limit on locked memory is reached: raise it (ulimit -l, "
                               "LimitMEMLOCK=) or lock fewer experts"},
    {"COLIBRI_ERR_LOCK_FAILED",
     "the system does not lock this memory: free some, or run where locking is allowed"},
    {"COLIBRI_ERR_HUGE_PAGES", "the system gives this process no huge pages: allow them "
                               "(transparent_hugepage=madvise) or go without"},
    {"COLIBRI_ERR_RELEASE_FAILED",
     "the system does not release this memory: unlock these experts first"},
    {"COLIBRI_ERR_THREAD_FAILED", "a prefetching thread cannot be started: raise the limit (ulimit "
                                  "-u), free memory, or go without"},
    {"COLIBRI_ERR_UNSUPPORTED",
     "this system has no such service: read the model into memory and give that to colibri_init"},
    {"COLIBRI_ERR_CONTEXT",
     "the text does not fit the model's context: rewind, or export with a longer one (--context)"},
    {"COLIBRI_ERR_TOKEN", "a token id is not in the vocabulary: use the model's own tokenizer"},
    {"COLIBRI_ERR_REWIND", "the positions to go back to are no longer in the cache: rewind to 0 "
                           "and evaluate the text again"},
    {"COLIBRI_ERR_TOKENIZER",
     "this is not a tokenizer.bin, or it is damaged: write or copy it again"},
    {"COLIBRI_ERR_SCRATCH",
     "the scratch memory is too small for this text: give it colibri_tokenizer_scratch() bytes"},
    {"COLIBRI_ERR_OUTPUT",
     "the output array is too small: give it room for as many elements as the count returned"},
    {"COLIBRI_ERR_SOURCE",
     "an encoder-decoder model, and no other, reads a source text first: see colibri_lm_source"},
    {"COLIBRI_ERR_ARITHMETIC", "this build or machine does not compute as IEEE 754 says: compile "
                               "without options that change floats (docs/arithmetic.md)"},
    {"COLIBRI_ERR_BUSY",
     "the context is running already: a hook or another thread needs a context of its own"},
    {"COLIBRI_ERR_UNFINISHED", "the self-test would end the text or stream that this context "
                               "holds: test a second context, or set position and source to 0"},
    {"COLIBRI_ERR_VOCABULARY",
     "a token, merge or template of the tokenizer.bin is not valid: write it again"},
    {"COLIBRI_ERR_ADDED_TOKEN",
     "the added tokens of the tokenizer.bin are not tries of whole characters: write it again"},
    {"COLIBRI_ERR_PATTERN",
     "a split pattern or a character class of the tokenizer.bin is not valid: write it again"},
    {"COLIBRI_ERR_NORMAL_FORM",
     "the normal form (NFC) of the tokenizer.bin is not valid: write it again"},
    {"COLIBRI_ERR_TOO_SLOW", "the patterns or added tokens of the tokenizer.bin take too much work "
                             "for this text: write it again"},
    {"COLIBRI_ERR_DAMAGED", "the context's head was overwritten: look for a stray write, and start "
                            "again with colibri_init"},
    {"COLIBRI_ERR_ORDER", "an operation of the model reads what none has written, or another "
                          "row's, or overwrites what it still reads: export it again"}};
