/* The usual call of a model, without the checks and copies of the general path: one contiguous
 * float32 array that fits goes in, one new array comes out. Whatever else comes is answered with
 * None, and Python takes the general path. Belongs to colibri._engine, whose other functions cffi
 * makes. */
#define Py_LIMITED_API 0x030B0000 /* Python 3.11 and every later one */
#include <Python.h>

#include "colibri.h"

#include <stdbool.h>
#include <string.h>

/* What the calls of one model share, a tuple: the arguments of `caller`. */
enum {
    CONTEXTS,  /* list of unused contexts: tuples that begin with the address */
    MAX_BATCH, /* 0: the general path takes every call */
    SHAPE,     /* of an input row */
    RESULT,    /* of an output row */
    ARRAY,     /* numpy.ndarray */
    EMPTY,     /* numpy.empty */
    FLOAT      /* numpy.dtype(numpy.float32) */
};

static bool fits(PyObject *model, const Py_buffer *x) {
    PyObject *shape = PyTuple_GetItem(model, SHAPE);
    /* Other byte orders and floats that are not aligned have longer formats. */
    bool same = strcmp(x->format, "f") == 0 && x->ndim == PyTuple_Size(shape) + 1 &&
                x->shape[0] >= 1 &&
                x->shape[0] <= PyLong_AsSsize_t(PyTuple_GetItem(model, MAX_BATCH));
    for (int i = 1; same && i < x->ndim; ++i) {
        same = x->shape[i] == PyLong_AsSsize_t(PyTuple_GetItem(shape, i - 1));
    }
    return same;
}

static PyObject *new_output(PyObject *model, Py_ssize_t batch) {
    PyObject *row = PyTuple_GetItem(model, RESULT);
    const Py_ssize_t axes = PyTuple_Size(row);
    PyObject *shape = PyTuple_New(axes + 1), *first = PyLong_FromSsize_t(batch), *output = NULL;
    if (shape && first) {
        PyTuple_SetItem(shape, 0, Py_NewRef(first));
        for (Py_ssize_t i = 0; i < axes; ++i) {
            PyTuple_SetItem(shape, i + 1, Py_NewRef(PyTuple_GetItem(row, i)));
        }
        output = PyObject_CallFunctionObjArgs(PyTuple_GetItem(model, EMPTY), shape,
                                              PyTuple_GetItem(model, FLOAT), NULL);
    }
    Py_XDECREF(first);
    Py_XDECREF(shape);
    return output;
}

static PyObject *run(PyObject *model, const Py_buffer *x) {
    PyObject *contexts = PyTuple_GetItem(model, CONTEXTS);
    const Py_ssize_t last = PyList_Size(contexts) - 1;
    if (last < 0) {
        Py_RETURN_NONE; /* the general path makes one, and leaves it in the list */
    }
    PyObject *context = Py_NewRef(PyList_GetItem(contexts, last));
    if (PyList_SetSlice(contexts, last, last + 1, NULL)) {
        Py_DECREF(context);
        return NULL;
    }
    PyObject *output = new_output(model, x->shape[0]);
    Py_buffer y;
    if (output && PyObject_GetBuffer(output, &y, PyBUF_WRITABLE) == 0) {
        colibri_context_t *ctx = PyLong_AsVoidPtr(PyTuple_GetItem(context, 0));
        Py_BEGIN_ALLOW_THREADS colibri_forward(ctx, x->buf, y.buf, (int)x->shape[0]);
        Py_END_ALLOW_THREADS PyBuffer_Release(&y);
        if (ctx->status !=
            /* the general path runs it again, and raises what went wrong by its name */
            COLIBRI_OK) {
            Py_DECREF(output);
            output = Py_NewRef(Py_None);
        }
    } else {
        Py_CLEAR(output);
    }
    if (PyList_Append(contexts, context)) {
        Py_CLEAR(output);
    }
    Py_DECREF(context);
    return output;
}

static PyObject *call(PyObject *model, PyObject *const *inputs, Py_ssize_t count) {
    Py_buffer x;
    if (count != 1 || (PyObject *)Py_TYPE(inputs[0]) != PyTuple_GetItem(model, ARRAY)) {
        Py_RETURN_NONE;
    }
    if (PyObject_GetBuffer(inputs[0], &x,
                           PyBUF_ND | PyBUF_FORMAT)) { /* not contiguous, or without a format */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *output = fits(model, &x) ? run(model, &x) : Py_NewRef(Py_None);
    PyBuffer_Release(&x);
    return output;
}

static PyObject *caller(PyObject *module, PyObject *model) {
    static PyMethodDef method = {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL};
    PyObject *contexts, *shape, *result, *array, *empty, *dtype;
    int max_batch;
    (void)module;
    if (!PyArg_ParseTuple(model, "O!iO!O!OOO:caller", &PyList_Type, &contexts, &max_batch,
                          &PyTuple_Type, &shape, &PyTuple_Type, &result, &array, &empty, &dtype)) {
        return NULL;
    }
    return PyCFunction_New(&method, model);
}

PyMODINIT_FUNC
colibri_cffi_init(void); /* the PyInit__engine that cffi makes, renamed by _engine_build.py */

PyMODINIT_FUNC PyInit__engine(void) {
    static PyMethodDef functions[] = {{"caller", caller, METH_VARARGS, NULL}, {0}};
    PyObject *module = colibri_cffi_init();
    if (module && PyModule_AddFunctions(module, functions)) {
        Py_CLEAR(module);
    }
    return module;
}
