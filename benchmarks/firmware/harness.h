/* What a variant has for the harness. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Before the first forecast; not 0 where it cannot be used. */
int peer_start(void);

/* The coming change of one row of features, in the model's unit; a call wherever it is, so that
 * stacks compare. */
__attribute__((noinline)) float peer_forecast(const float *features);

#ifdef __cplusplus
}
#endif
