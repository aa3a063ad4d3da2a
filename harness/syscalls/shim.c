/* Fails chosen calls of the C library, for files below one folder and for connections to one port.

   Preloaded with LD_PRELOAD, it does nothing until `shim_use` hands it a `struct control` in memory that forked processes
   share: so one count runs over all of them. The order of CALLS and the fields of the struct are those of __init__.py. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum call {
  OPEN, READ, PREAD, WRITE, PWRITE, FSYNC, FDATASYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, STAT, FSTAT, FTRUNCATE, CLOSE,
  LISTDIR, READDIR, ACCESS, FLOCK, STATVFS, LSEEK, CONNECT, SEND, RECV, CALLS
};

struct control {
  int64_t armed;       /* 0: every call passes and is not counted */
  int64_t call, at;    /* which one fails: the at-th of its kind, counted from 1 */
  int64_t how;         /* an errno, or one of those below */
  int64_t lasting;     /* 1: those after it fail too; 2: every kind of call does */
  int64_t port;        /* connections that are counted */
  int64_t fired;       /* how many calls failed */
  int64_t journalled;  /* after a failed sync, the same process wrote to a journal or published */
  int64_t unsynced;    /* descriptors that were closed with bytes that were not synced through them */
  int64_t counts[CALLS];
  char folder[512], where[512];
};
enum { SHORT = -1, ZERO = -2 };
enum { TRACKED = 1, DIRTY = 2, JOURNAL = 4, DIRECT = 8 };

static struct control *control;
static unsigned char seen[1 << 16];
static int sync_failed;

void shim_use(struct control *given) { control = given; sync_failed = 0; }

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

static int below(const char *path) {
  if (!control || !control->armed || !path || !control->folder[0]) return 0;
  size_t length = strlen(control->folder);
  return !strncmp(path, control->folder, length) && (path[length] == '/' || !path[length]);
}

static int tracked(int fd) { return control && control->armed && fd >= 0 && fd < (int)sizeof seen && (seen[fd] & TRACKED); }

static void mark(int fd, const char *path, int flags) {
  if (fd < 0 || fd >= (int)sizeof seen) return;
  const char *name = path ? strrchr(path, '/') : 0;
  /* Nothing that is written past the cache waits for a sync through this very descriptor. */
  seen[fd] = TRACKED | (flags & O_DIRECT ? DIRECT : 0) | (name && !strncmp(name, "/journal-", 9) ? JOURNAL : 0);
}

/* What becomes of a call: 0 it passes, else an errno, SHORT or ZERO. */
static int fate(enum call call, const char *path, int fd) {
  int64_t number = __sync_add_and_fetch(&control->counts[call], 1);
  int hit = call == control->call && (number == control->at || (control->lasting && number > control->at));
  if (!hit && !(control->lasting == 2 && control->fired)) return 0;
  if (call == CLOSE && !hit) return 0;
  if (!__sync_fetch_and_add(&control->fired, 1)) {
    char link[32];
    ssize_t length = 0;
    if (path) snprintf(control->where, sizeof control->where, "%s", path);
    else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
      length = REAL(readlink)(link, control->where, sizeof control->where - 1);
      control->where[length > 0 ? length : 0] = 0;
    }
  }
  return hit || control->how > 0 ? (int)control->how : EIO;
}

#define FAILS(call, path, fd, result) \
  int fate_ = fate(call, path, fd); \
  if (fate_ > 0) { errno = fate_; return result; }

#define ON_PATH(call, path, ...) \
  if (below(path)) { FAILS(call, path, -1, -1) } \
  return __VA_ARGS__;
#define ON_FD(call, fd, ...) \
  if (tracked(fd)) { FAILS(call, 0, fd, -1) } \
  return __VA_ARGS__;

static int inside(int folder, const char *path) { return path && (path[0] == '/' ? below(path) : tracked(folder)); }

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    int is = below(path); \
    if (is) { FAILS(OPEN, path, -1, -1) } \
    int fd = REAL(name)(path, flags, mode); \
    if (is) mark(fd, path, flags); \
    return fd; \
  }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    int is = inside(folder, path); \
    if (is) { FAILS(OPEN, path, -1, -1) } \
    int fd = REAL(name)(folder, path, flags, mode); \
    if (is) mark(fd, path, flags); \
    return fd; \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int fd) {
  int is = tracked(fd), fate_ = 0;
  if (fd >= 0 && fd < (int)sizeof seen) {
    if (is && (seen[fd] & DIRTY)) __sync_fetch_and_add(&control->unsynced, 1);
    if (is) fate_ = fate(CLOSE, 0, fd);
    seen[fd] = 0;
  }
  int done = REAL(close)(fd);
  if (fate_ > 0) { errno = fate_; return -1; }
  return done;
}

/* The bytes that a read or a write is cut to; the call is not made where it gives none. */
static size_t cut(int fate_, size_t count) { return fate_ == SHORT && count > 1 ? count / 2 : count; }

#define READS(name, call, ...) \
  if (!tracked(fd)) return REAL(name)(__VA_ARGS__); \
  FAILS(call, 0, fd, -1) \
  if (fate_ == ZERO) return 0; \
  count = cut(fate_, count); \
  return REAL(name)(__VA_ARGS__);
ssize_t read(int fd, void *room, size_t count) { READS(read, READ, fd, room, count) }
ssize_t pread(int fd, void *room, size_t count, off_t at) { READS(pread, PREAD, fd, room, count, at) }
ssize_t pread64(int fd, void *room, size_t count, off64_t at) { READS(pread64, PREAD, fd, room, count, at) }

ssize_t preadv64v2(int fd, const struct iovec *rooms, int count, off64_t at, int flags) {
  if (!tracked(fd)) return REAL(preadv64v2)(fd, rooms, count, at, flags);
  FAILS(PREAD, 0, fd, -1)
  if (fate_ == ZERO) return 0;
  if (fate_ != SHORT) return REAL(preadv64v2)(fd, rooms, count, at, flags);
  struct iovec first = {rooms[0].iov_base, cut(SHORT, rooms[0].iov_len)};
  return REAL(preadv64v2)(fd, &first, 1, at, flags);
}

#define WRITES(name, call, ...) \
  if (!tracked(fd)) return REAL(name)(__VA_ARGS__); \
  FAILS(call, 0, fd, -1) \
  if (fate_ == ZERO) return 0; \
  if (sync_failed && (seen[fd] & JOURNAL)) __sync_fetch_and_add(&control->journalled, 1); \
  count = cut(fate_, count); \
  ssize_t done = REAL(name)(__VA_ARGS__); \
  if (done > 0 && !(seen[fd] & DIRECT)) __sync_fetch_and_or(&seen[fd], DIRTY); \
  return done;
ssize_t write(int fd, const void *raw, size_t count) { WRITES(write, WRITE, fd, raw, count) }
ssize_t pwrite(int fd, const void *raw, size_t count, off_t at) { WRITES(pwrite, PWRITE, fd, raw, count, at) }
ssize_t pwrite64(int fd, const void *raw, size_t count, off64_t at) { WRITES(pwrite64, PWRITE, fd, raw, count, at) }

#define SYNCS(name, call) \
  int name(int fd) { \
    if (!tracked(fd)) return REAL(name)(fd); \
    int fate_ = fate(call, 0, fd); \
    if (fate_ > 0) { \
      struct stat found; \
      if (fate_ != EINTR && !REAL(fstat)(fd, &found) && S_ISREG(found.st_mode)) sync_failed = 1; \
      errno = fate_; \
      return -1; \
    } \
    __sync_fetch_and_and(&seen[fd], (unsigned char)~DIRTY); \
    return REAL(name)(fd); \
  }

static int published(const char *from) {
  size_t length = strlen(from);
  return sync_failed && length > 8 && !strcmp(from + length - 8, ".partial") && !strstr(from, ".partial/");
}
int rename(const char *from, const char *to) {
  if (below(from) || below(to)) {
    FAILS(RENAME, from, -1, -1)
    if (published(from)) __sync_fetch_and_add(&control->journalled, 1);
  }
  return REAL(rename)(from, to);
}
int access(const char *path, int how) { ON_PATH(ACCESS, path, REAL(access)(path, how)) }
ssize_t readlink(const char *path, char *to, size_t count) { ON_PATH(STAT, path, REAL(readlink)(path, to, count)) }
int link(const char *from, const char *to) { ON_PATH(LINK, to, REAL(link)(from, to)) }
int unlink(const char *path) { ON_PATH(UNLINK, path, REAL(unlink)(path)) }
int unlinkat(int fd, const char *path, int flags) { if (inside(fd, path)) { FAILS(UNLINK, path, -1, -1) } return REAL(unlinkat)(fd, path, flags); }
int mkdir(const char *path, mode_t mode) { ON_PATH(MKDIR, path, REAL(mkdir)(path, mode)) }
int rmdir(const char *path) { ON_PATH(RMDIR, path, REAL(rmdir)(path)) }
int ftruncate(int fd, off_t size) { ON_FD(FTRUNCATE, fd, REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off64_t size) { ON_FD(FTRUNCATE, fd, REAL(ftruncate64)(fd, size)) }
int flock(int fd, int how) { ON_FD(FLOCK, fd, REAL(flock)(fd, how)) }
off_t lseek(int fd, off_t at, int from) { ON_FD(LSEEK, fd, REAL(lseek)(fd, at, from)) }
off64_t lseek64(int fd, off64_t at, int from) { ON_FD(LSEEK, fd, REAL(lseek64)(fd, at, from)) }
int stat(const char *path, struct stat *to) { ON_PATH(STAT, path, REAL(stat)(path, to)) }
int stat64(const char *path, struct stat64 *to) { ON_PATH(STAT, path, REAL(stat64)(path, to)) }
int lstat(const char *path, struct stat *to) { ON_PATH(STAT, path, REAL(lstat)(path, to)) }
int lstat64(const char *path, struct stat64 *to) { ON_PATH(STAT, path, REAL(lstat64)(path, to)) }
int fstat(int fd, struct stat *to) { ON_FD(FSTAT, fd, REAL(fstat)(fd, to)) }
int fstat64(int fd, struct stat64 *to) { ON_FD(FSTAT, fd, REAL(fstat64)(fd, to)) }
#define STATS_AT(name, type) \
  int name(int folder, const char *path, struct type *to, int flags) { \
    if (inside(folder, path)) { FAILS(STAT, path, -1, -1) } \
    return REAL(name)(folder, path, to, flags); \
  }
STATS_AT(fstatat, stat)
STATS_AT(fstatat64, stat64)
int statvfs(const char *path, struct statvfs *to) { ON_PATH(STATVFS, path, REAL(statvfs)(path, to)) }
int statvfs64(const char *path, struct statvfs64 *to) { ON_PATH(STATVFS, path, REAL(statvfs64)(path, to)) }
SYNCS(fsync, FSYNC)
SYNCS(fdatasync, FDATASYNC)

DIR *opendir(const char *path) {
  int is = below(path);
  if (is) { FAILS(LISTDIR, path, -1, 0) }
  DIR *found = REAL(opendir)(path);
  if (is && found) mark(dirfd(found), path, 0);
  return found;
}
#define READS_NAMES(name, type) \
  struct type *name(DIR *folder) { \
    if (tracked(dirfd(folder))) { FAILS(READDIR, 0, dirfd(folder), 0) } \
    return REAL(name)(folder); \
  }
READS_NAMES(readdir, dirent)
READS_NAMES(readdir64, dirent64)
int closedir(DIR *folder) {
  int fd = dirfd(folder);
  if (fd >= 0 && fd < (int)sizeof seen) seen[fd] = 0;
  return REAL(closedir)(folder);
}

int connect(int fd, const struct sockaddr *to, socklen_t length) {
  const struct sockaddr_in *there = (const struct sockaddr_in *)to;
  int is = control && control->armed && control->port && to->sa_family == AF_INET && ntohs(there->sin_port) == control->port;
  if (is) {
    FAILS(CONNECT, "connection", -1, -1)
    mark(fd, 0, 0);
  }
  return REAL(connect)(fd, to, length);
}
ssize_t send(int fd, const void *raw, size_t count, int flags) {
  if (!tracked(fd)) return REAL(send)(fd, raw, count, flags);
  FAILS(SEND, 0, fd, -1)
  return REAL(send)(fd, raw, cut(fate_, count), flags);
}
ssize_t sendmsg(int fd, const struct msghdr *raw, int flags) { ON_FD(SEND, fd, REAL(sendmsg)(fd, raw, flags)) }
ssize_t recv(int fd, void *room, size_t count, int flags) {
  if (!tracked(fd)) return REAL(recv)(fd, room, count, flags);
  FAILS(RECV, 0, fd, -1)
  if (fate_ == ZERO) return 0;
  return REAL(recv)(fd, room, cut(fate_, count), flags);
}
