/* Walks over tensors and modules, which find out whether anything but the values of the tensors has changed.
   unchanged.py calls them by ctypes, with the interpreter lock. */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>

int wu_version = 1; /* of the functions here; unchanged.py uses no other, as may be left from an earlier build */

/* The parts of DLPack 1 that are needed here. Source: include/dlpack/dlpack.h of DLPack 1.3. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *prev_api, *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
    int (*dltensor_from_py_object)(void *, DLTensor *);
} DLPackExchangeAPI;

/* Numbers that are written by one walk, and compared by later ones. */
typedef struct {
    int64_t *next, *end;
    int writes;
} Numbers;

static int agree(Numbers *all, int64_t number)
{
    if (all->next == all->end)
        return 0;
    if (all->writes)
        *all->next = number;
    return *all->next++ == number;
}

/* Describe a list of tensors by `count` numbers: 4 for each, and 2 for each dimension. Write them, or return
   whether they are as before. Return 0 if a tensor cannot be described or if there are more or fewer numbers. */
int wu_tensors(PyObject *tensors, const DLPackExchangeAPI *api, int64_t *numbers, int64_t count, int writes)
{
    Numbers all = {numbers, numbers + count, writes};
    Py_ssize_t length = PyList_Size(tensors);
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *tensor = PyList_GetItem(tensors, i);
        DLTensor one;
        if (api->dltensor_from_py_object(tensor, &one) != 0) {
            PyErr_Clear();
            return 0;
        }
        int64_t kind = (int64_t)one.device_type << 32 | (int64_t)one.code << 24 | one.bits << 16 | one.lanes;
        if (!agree(&all, (intptr_t)Py_TYPE(tensor)) || !agree(&all, (intptr_t)one.data + one.byte_offset) ||
            !agree(&all, kind) || !agree(&all, one.ndim))
            return 0;
        for (int32_t d = 0; d < one.ndim; d++)
            if (!agree(&all, one.shape[d]) || !agree(&all, one.strides[d]))
                return 0;
    }
    return all.next == all.end;
}

/* Objects that are appended to a list by one walk, and compared by later ones. */
typedef struct {
    PyObject *list;
    Py_ssize_t next, length; /* length is -1 while objects are appended */
} Objects;

static int is_same(Objects *all, PyObject *object)
{
    if (all->length < 0)
        return PyList_Append(all->list, object) == 0;
    return all->next < all->length && PyList_GetItem(all->list, all->next++) == object;
}

enum { PARAMETERS, BUFFERS, MODULES, NAMED_MODULES, STATE_DICT, SAVE, HOOKS, PRE_HOOKS, TRANSIENT, ATTRIBUTES };

static const char *const names[ATTRIBUTES] = {"_parameters",           "_buffers",         "_modules",
                                              "named_modules",         "state_dict",       "_save_to_state_dict",
                                              "_state_dict_hooks",     "_state_dict_pre_hooks",
                                              "_non_persistent_buffers_set"};
static PyObject *interned[ATTRIBUTES];

static int intern_names(void)
{
    for (int i = 0; i < ATTRIBUTES; i++)
        if (interned[i] == NULL && (interned[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return 0;
    return 1;
}

/* The entry of a dict, or NULL. */
static PyObject *entry(PyObject *own, int name)
{
    return PyDict_GetItemWithError(own, interned[name]);
}

static int is_same_dict(Objects *all, PyObject *dict)
{
    if (dict == NULL || !PyDict_CheckExact(dict) || !is_same(all, dict))
        return 0;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value))
        if (!is_same(all, key) || !is_same(all, value))
            return 0;
    return 1;
}

static int is_empty(PyObject *dict)
{
    return dict != NULL && PyDict_Check(dict) && PyDict_Size(dict) == 0;
}

/* The names of buffers that are not in state dicts; a set has the same order as long as it is not changed. */
static int is_same_set(Objects *all, PyObject *set)
{
    if (set == NULL || !PyAnySet_Check(set))
        return 0;
    if (PySet_Size(set) == 0)
        return 1;
    PyObject *names = PySequence_List(set);
    int same = names != NULL;
    for (Py_ssize_t i = 0; same && i < PyList_Size(names); i++)
        same = is_same(all, PyList_GetItem(names, i));
    Py_XDECREF(names);
    return same;
}

static int is_same_part(Objects *all, PyObject *part, PyObject *own, int as_state_dict)
{
    if (!is_same(all, (PyObject *)Py_TYPE(part)) || entry(own, NAMED_MODULES) != NULL)
        return 0;
    if (!is_same_dict(all, entry(own, PARAMETERS)) || !is_same_dict(all, entry(own, BUFFERS)) ||
        !is_same_dict(all, entry(own, MODULES)))
        return 0;
    if (!as_state_dict)
        return 1;
    return entry(own, STATE_DICT) == NULL && entry(own, SAVE) == NULL &&
           is_empty(entry(own, HOOKS)) && is_empty(entry(own, PRE_HOOKS)) &&
           is_same_set(all, entry(own, TRANSIENT));
}

/* Append the objects that decide which weights a list of modules has, or return whether they are as before.
   Return 0 if the weights of a module are not found in torch's way. */
int wu_modules(PyObject *parts, PyObject *objects, int as_state_dict, int appends)
{
    Objects all = {objects, 0, appends ? -1 : PyList_Size(objects)};
    Py_ssize_t length = PyList_Size(parts);
    int same = intern_names();
    for (Py_ssize_t i = 0; same && i < length; i++) {
        PyObject *part = PyList_GetItem(parts, i), *own = PyObject_GenericGetDict(part, NULL);
        same = own != NULL && is_same_part(&all, part, own, as_state_dict);
        Py_XDECREF(own);
    }
    PyErr_Clear();
    return same && (appends || all.next == all.length);
}

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_unchanged", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__unchanged(void)
{
    return PyModule_Create(&module);
}
