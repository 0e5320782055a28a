// Makes threads scarce: once the file that PRECAST_TEST_SCARCE names is there, no thread is made beyond as many as it has
// bytes. Preloaded by tests/runtime/threads.rs, because a limit of the system does not hold for root.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>

static atomic_long made;

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_create");
    const char *path = getenv("PRECAST_TEST_SCARCE");
    struct stat file;
    if (path && stat(path, &file) == 0 && atomic_fetch_add(&made, 1) >= file.st_size) return EAGAIN;
    return real(thread, attributes, run, argument);
}
