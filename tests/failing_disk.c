/* A shared library for LD_PRELOAD: file operations below a folder fail, or wait.

   FAILING_ROOT is the folder. FAILING_PLAN is a file with lines "FROM TO ERRNO":
   between these two times (seconds since the epoch), an operation fails with ERRNO, or
   if it is 0, waits until the end. The file is read once. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct failure {
  double from, to;
  int number;
};
static struct failure plan[64];
static int failures = -1;
static const char *root;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

__attribute__((constructor)) static void read_plan(void) {
  int i = 0;
  root = getenv("FAILING_ROOT");
  const char *name = getenv("FAILING_PLAN");
  FILE *file = name ? fopen(name, "r") : NULL;
  while (file && i < 64 &&
         fscanf(file, "%lf %lf %d", &plan[i].from, &plan[i].to, &plan[i].number) == 3)
    i++;
  if (file) fclose(file);
  failures = i;
}

/* Returns the error of an operation on this path now, or 0. */
static int error_of(const char *path) {
  if (!root || failures <= 0 || !path || strncmp(path, root, strlen(root))) return 0;
  double t = now();
  for (int i = 0; i < failures; i++)
    if (plan[i].from <= t && t < plan[i].to) {
      if (plan[i].number) return plan[i].number;
      usleep((plan[i].to - t) * 1e6);
    }
  return 0;
}

static int error_of_open(int fd) {
  char link[32], path[PATH_MAX];
  if (!root || failures <= 0 || fd < 3) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return error_of(path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(error)      \
  do {                   \
    int number = error;  \
    if (number) {        \
      errno = number;    \
      return -1;         \
    }                    \
  } while (0)

static int mode_of(int flags, va_list rest) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
}

#define OPEN(name)                            \
  int name(const char *path, int flags, ...) { \
    va_list rest;                             \
    va_start(rest, flags);                    \
    int mode = mode_of(flags, rest);          \
    va_end(rest);                             \
    FAIL(error_of(path));                     \
    return NEXT(name)(path, flags, mode);     \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
  FAIL(error_of_open(fd));
  return NEXT(write)(fd, data, size);
}
ssize_t read(int fd, void *data, size_t size) {
  FAIL(error_of_open(fd));
  return NEXT(read)(fd, data, size);
}
int fsync(int fd) {
  FAIL(error_of_open(fd));
  return NEXT(fsync)(fd);
}
int rename(const char *from, const char *to) {
  FAIL(error_of(from));
  return NEXT(rename)(from, to);
}
int unlink(const char *path) {
  FAIL(error_of(path));
  return NEXT(unlink)(path);
}
int mkdir(const char *path, mode_t mode) {
  FAIL(error_of(path));
  return NEXT(mkdir)(path, mode);
}
int rmdir(const char *path) {
  FAIL(error_of(path));
  return NEXT(rmdir)(path);
}
int stat(const char *path, struct stat *into) {
  FAIL(error_of(path));
  return NEXT(stat)(path, into);
}
int stat64(const char *path, struct stat64 *into) {
  FAIL(error_of(path));
  return NEXT(stat64)(path, into);
}
int lstat64(const char *path, struct stat64 *into) {
  FAIL(error_of(path));
  return NEXT(lstat64)(path, into);
}
int fstatat64(int folder, const char *path, struct stat64 *into, int flags) {
  FAIL(error_of(path));
  return NEXT(fstatat64)(folder, path, into, flags);
}
DIR *opendir(const char *path) {
  int number = error_of(path);
  if (number) {
    errno = number;
    return NULL;
  }
  return NEXT(opendir)(path);
}
