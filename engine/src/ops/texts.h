/* The operations on texts and streams, for generated.h: no part of the core. */
#include "attention.c"
#include "cache.c"
#include "delay.c"
#include "delta.c"
#include "embed.c"
#include "rope.c"
