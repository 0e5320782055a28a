// A CUDA driver that writes down what it is asked, one line each, into the file that FAKE_DRIVER_LOG names.
#include <stdio.h>
#include <stdlib.h>

static int report(const char *what, int value) {
  FILE *log = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  fprintf(log, "%s %d\n", what, value);
  fclose(log);
  return 0;
}

int cuInit(unsigned flags) { return report("init", (int)flags); }

// It has no device that libtorch could work with.
int cuDeviceGetCount(int *count) {
  *count = 0;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) { return report("attribute", attribute); }

int cuDeviceGet(int *device, int ordinal) {
  *device = 100 + ordinal;
  return report("device", ordinal);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = NULL;
  return report("context", device);
}

int cuDeviceGetName(char *name, int length, int device) { return report("name", snprintf(name, length, "fake")); }
