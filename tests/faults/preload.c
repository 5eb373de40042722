/* Counts the operations that change files under one folder, in every process of a job, and at a chosen one ends them all
   as a kill does, optionally halfway through a write, or lets the disk be full from there on.

   Loaded with LD_PRELOAD; what it obeys lies in a file that all processes map, named by FAULTS_CONTROL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL, FULL };
enum { PROCESSES = 256 };

struct control {          /* injector.py has the same */
    atomic_int count;     /* operations so far */
    int at;               /* the one that fails; 0: none */
    int half;             /* half of a write is done first */
    int mode;
    atomic_int processes;
    pid_t pids[PROCESSES];
    char folder[4096];
};

static struct control *control;

static void join_job(void) {
    if (!control) return;
    int place = atomic_fetch_add(&control->processes, 1);
    if (place < PROCESSES) control->pids[place] = getpid();
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_CONTROL");
    if (!path) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return;
    control = mapped;
    join_job();
    pthread_atfork(NULL, NULL, join_job);
}

static void end_all(void) {
    int known = atomic_load(&control->processes);
    for (int i = 0; i < known && i < PROCESSES; i++)
        if (control->pids[i] != getpid()) kill(control->pids[i], SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int under(const char *path) {
    size_t length = strlen(control->folder);
    return length && !strncmp(path, control->folder, length) && (path[length] == '/' || !path[length]);
}

static int inside_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return under(path);
}

static int inside(int dir, const char *name) {
    if (!control || !control->folder[0] || !name) return 0;
    if (name[0] == '/') return under(name);
    if (dir != AT_FDCWD) return inside_fd(dir);
    char path[PATH_MAX];
    return getcwd(path, sizeof path) && under(path);
}

static int inside_open(int fd) { return control && control->folder[0] && inside_fd(fd); }

/* Counts an operation. Returns 1 if a full disk refuses it, 2 if it is a write of which half is to be done first. */
static int fault(int takes_room) {
    int number = atomic_fetch_add(&control->count, 1) + 1, at = control->at;
    if (!at || number < at) return 0;
    if (control->mode == FULL) {
        if (!takes_room) return 0;
        return number == at && control->half && takes_room == 2 ? 2 : 1;
    }
    if (number > at) return 0; /* another thread, in the moment before the end */
    if (control->half && takes_room == 2) return 2;
    end_all();
    return 0;
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define REFUSE(failed) do { errno = ENOSPC; return failed; } while (0)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if (flags & (O_CREAT | O_TRUNC) && inside(AT_FDCWD, path) && fault(1)) REFUSE(-1); \
        return real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if (flags & (O_CREAT | O_TRUNC) && inside(dir, path) && fault(1)) REFUSE(-1); \
        return real(dir, path, flags, mode); \
    }
#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        REAL(FILE *, name, const char *, const char *); \
        if (strpbrk(how, "wa") && inside(AT_FDCWD, path) && fault(1)) REFUSE(NULL); \
        return real(path, how); \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)

/* A write of `size` bytes: refused, done by half and then the end, or done. */
#define WRITE(name, type, parameters, arguments, halved, size, fd) \
    type name parameters { \
        static type(*real) parameters; \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (!inside_open(fd)) return real arguments; \
        switch (fault(2)) { \
        case 1: REFUSE(-1); \
        case 2: { \
            type done = (size) > 1 ? real halved : 0; \
            if (control->mode == KILL) end_all(); \
            if ((size) < 2) REFUSE(-1); \
            return done; \
        } \
        } \
        return real arguments; \
    }
WRITE(write, ssize_t, (int fd, const void *from, size_t n), (fd, from, n), (fd, from, n / 2), n, fd)
WRITE(pwrite, ssize_t, (int fd, const void *from, size_t n, off_t o), (fd, from, n, o), (fd, from, n / 2, o), n, fd)
WRITE(pwrite64, ssize_t, (int fd, const void *from, size_t n, off64_t o), (fd, from, n, o), (fd, from, n / 2, o), n, fd)
WRITE(writev, ssize_t, (int fd, const struct iovec *from, int n), (fd, from, n), (fd, from, n / 2), n, fd)
WRITE(sendfile, ssize_t, (int fd, int from, off_t *o, size_t n), (fd, from, o, n), (fd, from, o, n / 2), n, fd)
WRITE(sendfile64, ssize_t, (int fd, int from, off64_t *o, size_t n), (fd, from, o, n), (fd, from, o, n / 2), n, fd)
WRITE(copy_file_range, ssize_t, (int in, off64_t *a, int fd, off64_t *b, size_t n, unsigned f), (in, a, fd, b, n, f),
      (in, a, fd, b, n / 2, f), n, fd)

/* Everything else that changes a folder: named by a path, or by a descriptor and a path. */
#define CHANGE(name, parameters, arguments, where, takes_room) \
    int name parameters { \
        static int(*real) parameters; \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (control && (where) && fault(takes_room)) REFUSE(-1); \
        return real arguments; \
    }
CHANGE(rename, (const char *a, const char *b), (a, b), inside(AT_FDCWD, b), 0)
CHANGE(renameat, (int i, const char *a, int j, const char *b), (i, a, j, b), inside(j, b), 0)
CHANGE(renameat2, (int i, const char *a, int j, const char *b, unsigned f), (i, a, j, b, f), inside(j, b), 0)
CHANGE(unlink, (const char *a), (a), inside(AT_FDCWD, a), 0)
CHANGE(unlinkat, (int i, const char *a, int f), (i, a, f), inside(i, a), 0)
CHANGE(rmdir, (const char *a), (a), inside(AT_FDCWD, a), 0)
CHANGE(mkdir, (const char *a, mode_t m), (a, m), inside(AT_FDCWD, a), 1)
CHANGE(mkdirat, (int i, const char *a, mode_t m), (i, a, m), inside(i, a), 1)
CHANGE(symlink, (const char *a, const char *b), (a, b), inside(AT_FDCWD, b), 1)
CHANGE(link, (const char *a, const char *b), (a, b), inside(AT_FDCWD, b), 1)
CHANGE(ftruncate, (int fd, off_t n), (fd, n), inside_open(fd), 1)
CHANGE(ftruncate64, (int fd, off64_t n), (fd, n), inside_open(fd), 1)
CHANGE(truncate, (const char *a, off_t n), (a, n), inside(AT_FDCWD, a), 1)
