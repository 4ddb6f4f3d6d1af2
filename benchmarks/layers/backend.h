/* What driver.c needs of a layer; implemented by driver_colibri.c and plain.c. One model a
 * process. */
#ifndef BACKEND_H
#define BACKEND_H

/* Map the model at `path`; 0, or -1 with the reason on stderr. */
int backend_open(const char *path, int threads);

/* Floats of a row. */
int backend_input_size(void);
int backend_output_size(void);

/* x (batch, input_size) -> y (batch, output_size). */
void backend_forward(const float *x, float *y, int batch);

#endif
