/* Compilers make one instruction of it where there is one; where there is none, it is the
 * compiler's own library's. */
float sqrtf(float x);
