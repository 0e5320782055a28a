/*
 * LD_PRELOAD shim: counts, fails, cuts or kills at the N-th write-class call on files below one folder, and records what
 * was written and synced, so that states after a power loss can be made from it.
 *
 *   SHIM_ROOT   the folder to look at
 *   SHIM_MODE   count | kill | fail | ever | short | delay | trace
 *               (short: half of the bytes are written, then SIGKILL; delay: waits a moment before the call)
 *   SHIM_AT     number of the call, from 1
 *   SHIM_ERRNO  what `fail` (once) and `ever` (from then on) set
 *   SHIM_OUT    where `count` writes the number of calls, and `trace` the calls
 *   SHIM_ALONE  children of the process run without the shim
 *
 * Calls are numbered over all threads. A file that ends in `.ack` is not counted: what is written to it is recorded as
 * "this was promised".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, COUNT, KILL, FAIL, EVER, SHORT, DELAY, TRACE };
#define FDS 4096

static int mode = -1, at, error_number, out = -1;
static char root[4096];
static size_t root_length;
static int calls;
static unsigned char tracked[FDS]; /* 1: below the root, 2: an .ack file */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static ssize_t raw_write(int fd, const void *bytes, size_t n)
{
    REAL(ssize_t, write, int, const void *, size_t);
    return real(fd, bytes, n);
}

static int raw_open(const char *path, int flags)
{
    REAL(int, open, const char *, int, ...);
    return real(path, flags, 0644);
}

__attribute__((constructor)) static void setup(void)
{
    const char *text = getenv("SHIM_MODE"), *folder = getenv("SHIM_ROOT"), *file = getenv("SHIM_OUT");
    static const char *names[] = {"none", "count", "kill", "fail", "ever", "short", "delay", "trace"};
    if (mode >= 0) return;
    mode = NONE;
    if (!text || !folder) return;
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    for (int i = 0; i < 8; i++)
        if (!strcmp(text, names[i])) mode = i;
    if (getenv("SHIM_ALONE")) unsetenv("LD_PRELOAD");
    if (getenv("SHIM_AT")) at = atoi(getenv("SHIM_AT"));
    if (getenv("SHIM_ERRNO")) error_number = atoi(getenv("SHIM_ERRNO"));
    if (file) out = raw_open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
}

__attribute__((destructor)) static void finish(void)
{
    if (mode == COUNT && out >= 0) dprintf(out, "%d\n", calls);
}

/* The end without destructors. */
void _exit(int code)
{
    REAL(void, _exit, int);
    finish();
    real(code);
    __builtin_unreachable();
}

/* Returns the absolute path in `buffer`, or NULL. */
static const char *absolute(int folder, const char *path, char *buffer)
{
    char link[64];
    ssize_t n;
    if (!path) return NULL;
    if (path[0] == '/') return path;
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    n = readlink(link, buffer, 2048);
    if (n <= 0) return NULL;
    snprintf(buffer + n, 4096 - n, "/%s", path);
    return buffer;
}

static int below(const char *path)
{
    size_t n = path ? strlen(path) : 0;
    if (n > 4 && !strcmp(path + n - 4, ".ack")) return 2;
    return path && mode > NONE && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int watched(int fd) { return fd >= 0 && fd < FDS ? tracked[fd] : 0; }

/* One more call: returns 1 when it has to fail. */
static int step(void)
{
    int n = __sync_add_and_fetch(&calls, 1), fails = 0;
    if (mode == KILL && n == at) kill(getpid(), SIGKILL);
    if (mode == DELAY && n == at) usleep(100 * 1000);
    if (mode == FAIL) fails = n == at;
    if (mode == EVER) fails = n >= at;
    if (fails) errno = error_number;
    return fails;
}

static void record(const char *kind, uint64_t a, uint64_t b, const char *one, const char *two, const void *data, size_t n)
{
    char head[9000];
    int saved = errno;
    if (mode != TRACE || out < 0) return;
    int length = snprintf(head, sizeof head, "%s\t%llu\t%llu\t%s\t%s\t%zu\n", kind, (unsigned long long)a,
                          (unsigned long long)b, one ? one : "", two ? two : "", n);
    pthread_mutex_lock(&mutex);
    raw_write(out, head, length);
    if (n) raw_write(out, data, n);
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

static uint64_t inode(int fd)
{
    struct stat st;
    return fstat(fd, &st) ? 0 : st.st_ino;
}

static uint64_t inode_at(const char *path)
{
    struct stat st;
    return lstat(path, &st) ? 0 : st.st_ino;
}

static int opened(const char *path, int flags, int fd, int existed)
{
    int kind = below(path);
    if (fd >= 0 && fd < FDS) tracked[fd] = kind;
    if (fd >= 0 && kind == 1 && (flags & O_CREAT) && !existed) record("new", inode(fd), 0, path, NULL, NULL, 0);
    if (fd >= 0 && kind == 1 && (flags & O_ACCMODE) != O_RDONLY && existed)
        record("open", inode(fd), 0, path, NULL, NULL, 0);
    if (fd >= 0 && kind == 1 && (flags & O_TRUNC) && existed) record("cut", inode(fd), 0, NULL, NULL, NULL, 0);
    return fd;
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        char buffer[4096];                                                                                             \
        mode_t bits = 0;                                                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_list list;                                                                                              \
            va_start(list, flags);                                                                                     \
            bits = va_arg(list, int);                                                                                  \
            va_end(list);                                                                                              \
        }                                                                                                              \
        REAL(int, name, const char *, int, ...);                                                                       \
        setup();                                                                                                       \
        const char *full = absolute(AT_FDCWD, path, buffer);                                                           \
        int existed = inode_at(path) != 0;                                                                             \
        int writes = (flags & (O_CREAT | O_TRUNC)) || error_number == EMFILE;                                          \
        if (below(full) == 1 && writes && step()) return -1;                                                           \
        return opened(full, flags, real(path, flags, bits), existed);                                                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...)                                                             \
    {                                                                                                                  \
        char buffer[4096];                                                                                             \
        mode_t bits = 0;                                                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                           \
            va_list list;                                                                                              \
            va_start(list, flags);                                                                                     \
            bits = va_arg(list, int);                                                                                  \
            va_end(list);                                                                                              \
        }                                                                                                              \
        REAL(int, name, int, const char *, int, ...);                                                                  \
        setup();                                                                                                       \
        const char *full = absolute(folder, path, buffer);                                                             \
        int existed = full && inode_at(full) != 0;                                                                     \
        int writes = (flags & (O_CREAT | O_TRUNC)) || error_number == EMFILE;                                          \
        if (below(full) == 1 && writes && step()) return -1;                                                           \
        return opened(full, flags, real(folder, path, flags, bits), existed);                                          \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd)
{
    REAL(int, close, int);
    if (fd >= 0 && fd < FDS) tracked[fd] = 0;
    return real(fd);
}

/* Cuts a write in half and ends the process, or returns. */
#define CUT(n, action)                                                                                                 \
    if (mode == SHORT && calls == at) {                                                                                \
        if ((n) > 1) (void)!(action);                                                                                  \
        kill(getpid(), SIGKILL);                                                                                       \
    }

ssize_t write(int fd, const void *bytes, size_t n)
{
    REAL(ssize_t, write, int, const void *, size_t);
    int kind = watched(fd);
    if (kind == 2) {
        record("ack", 0, 0, NULL, NULL, bytes, n);
    } else if (kind == 1) {
        if (step()) return -1;
        CUT(n, real(fd, bytes, n / 2));
        off_t before = lseek(fd, 0, SEEK_CUR);
        ssize_t done = real(fd, bytes, n);
        if (done > 0) record("put", inode(fd), before, NULL, NULL, bytes, done);
        return done;
    }
    return real(fd, bytes, n);
}

#define PWRITE(name)                                                                                                   \
    ssize_t name(int fd, const void *bytes, size_t n, off_t offset)                                                    \
    {                                                                                                                  \
        REAL(ssize_t, name, int, const void *, size_t, off_t);                                                         \
        if (watched(fd) != 1) return real(fd, bytes, n, offset);                                                       \
        if (step()) return -1;                                                                                         \
        CUT(n, real(fd, bytes, n / 2, offset));                                                                        \
        ssize_t done = real(fd, bytes, n, offset);                                                                     \
        if (done > 0) record("put", inode(fd), offset, NULL, NULL, bytes, done);                                       \
        return done;                                                                                                   \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    REAL(ssize_t, writev, int, const struct iovec *, int);
    if (watched(fd) != 1) return real(fd, parts, count);
    /* One part at a time is a legal short write. */
    return count > 0 ? write(fd, parts[0].iov_base, parts[0].iov_len) : 0;
}

ssize_t copy_file_range(int in, off_t *from, int to, off_t *where, size_t n, unsigned flags)
{
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned);
    if (watched(to) != 1) return real(in, from, to, where, n, flags);
    errno = ENOSYS; /* the caller falls back to read and write */
    return -1;
}

#define SYNC(name)                                                                                                     \
    int name(int fd)                                                                                                   \
    {                                                                                                                  \
        REAL(int, name, int);                                                                                          \
        if (watched(fd) != 1) return real(fd);                                                                         \
        if (step()) return -1;                                                                                         \
        int done = real(fd);                                                                                           \
        if (!done) record("sync", inode(fd), 0, NULL, NULL, NULL, 0);                                                  \
        return done;                                                                                                   \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                                                                                                 \
    int name(int fd, off_t length)                                                                                     \
    {                                                                                                                  \
        REAL(int, name, int, off_t);                                                                                   \
        if (watched(fd) != 1) return real(fd, length);                                                                 \
        if (step()) return -1;                                                                                         \
        int done = real(fd, length);                                                                                   \
        if (!done) record("cut", inode(fd), length, NULL, NULL, NULL, 0);                                              \
        return done;                                                                                                   \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int fchmod(int fd, mode_t bits)
{
    REAL(int, fchmod, int, mode_t);
    if (watched(fd) == 1 && step()) return -1;
    return real(fd, bits);
}

int chmod(const char *path, mode_t bits)
{
    char buffer[4096];
    REAL(int, chmod, const char *, mode_t);
    if (below(absolute(AT_FDCWD, path, buffer)) == 1 && step()) return -1;
    return real(path, bits);
}

/* One or two names change. */
#define NAMES(kind, folder_a, path_a, folder_b, path_b, action)                                                        \
    char first[4096], second[4096];                                                                                    \
    const char *a = absolute(folder_a, path_a, first), *b = absolute(folder_b, path_b, second);                        \
    setup();                                                                                                           \
    if (below(a) != 1 && below(b) != 1) return action;                                                                 \
    if (step()) return -1;                                                                                             \
    char from[4096], to[4096];                                                                                         \
    snprintf(from, sizeof from, "%s", a ? a : "");                                                                     \
    snprintf(to, sizeof to, "%s", b ? b : "");                                                                         \
    int done = action;                                                                                                 \
    if (!done) record(kind, 0, 0, from, to, NULL, 0);                                                                  \
    return done

int rename(const char *a_, const char *b_)
{
    REAL(int, rename, const char *, const char *);
    NAMES("rename", AT_FDCWD, a_, AT_FDCWD, b_, real(a_, b_));
}

int renameat(int fa, const char *a_, int fb, const char *b_)
{
    REAL(int, renameat, int, const char *, int, const char *);
    NAMES("rename", fa, a_, fb, b_, real(fa, a_, fb, b_));
}

int renameat2(int fa, const char *a_, int fb, const char *b_, unsigned flags)
{
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    NAMES("rename", fa, a_, fb, b_, real(fa, a_, fb, b_, flags));
}

int link(const char *a_, const char *b_)
{
    REAL(int, link, const char *, const char *);
    NAMES("link", AT_FDCWD, a_, AT_FDCWD, b_, real(a_, b_));
}

int linkat(int fa, const char *a_, int fb, const char *b_, int flags)
{
    REAL(int, linkat, int, const char *, int, const char *, int);
    NAMES("link", fa, a_, fb, b_, real(fa, a_, fb, b_, flags));
}

int unlink(const char *a_)
{
    REAL(int, unlink, const char *);
    NAMES("unlink", AT_FDCWD, a_, AT_FDCWD, NULL, real(a_));
}

int unlinkat(int fa, const char *a_, int flags)
{
    REAL(int, unlinkat, int, const char *, int);
    NAMES("unlink", fa, a_, AT_FDCWD, NULL, real(fa, a_, flags));
}

int rmdir(const char *a_)
{
    REAL(int, rmdir, const char *);
    NAMES("unlink", AT_FDCWD, a_, AT_FDCWD, NULL, real(a_));
}

int mkdir(const char *a_, mode_t bits)
{
    REAL(int, mkdir, const char *, mode_t);
    NAMES("mkdir", AT_FDCWD, a_, AT_FDCWD, NULL, real(a_, bits));
}
