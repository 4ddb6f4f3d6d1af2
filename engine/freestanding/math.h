static inline float sqrtf(float x)
{
    return __builtin_sqrtf(x); /* one instruction, f32.sqrt */
}
