#include "sandbox/file_calls.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <nanobind/stl/string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "sandbox/linkage.hpp"

namespace nb = nanobind;

namespace memplan::sandbox {
namespace {

// What answers, while calls are taken, and the directory that holds what was written. Neither is ever
// deleted: a thread may be about to use them.
std::atomic<PyObject*> answers{nullptr};
std::atomic<const std::string*> overlay{nullptr};

// Whether this thread is answering a call, so that what Python does for it is done as it is.
thread_local bool answering = false;

// Holds the interpreter, and keeps an exception that is on its way in this thread.
class InPython {
 public:
  InPython() : state_(PyGILState_Ensure()) {
    PyErr_Fetch(&type_, &value_, &trace_);
    answering = true;
  }
  ~InPython() {
    answering = false;
    PyErr_Restore(type_, value_, trace_);
    PyGILState_Release(state_);
  }
  InPython(const InPython&) = delete;
  InPython& operator=(const InPython&) = delete;

 private:
  PyGILState_STATE state_;
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// Whether Python is to be asked about a path. Devices and the kernel's own files are the real ones.
bool asks(const char* path) {
  if (answers.load(std::memory_order_acquire) == nullptr || answering || path == nullptr ||
      *path == '\0' || Py_IsInitialized() == 0) {
    return false;
  }
  const std::string_view text(path);
  return !text.starts_with("/dev/") && !text.starts_with("/proc/") && !text.starts_with("/sys/");
}

// A folder's path from the root, as the script sees it; links stay.
std::string absolute(const std::string& folder) {
  char cwd[PATH_MAX];
  if (folder[0] == '/' || ::getcwd(cwd, sizeof cwd) == nullptr) return folder;
  const std::string& written = *overlay.load();
  const std::string_view from(cwd);
  return std::string(from.substr(from.starts_with(written) ? written.size() : 0)) + "/" + folder;
}

// Where a file to read is, as far as it is known without Python; none where Python has to be asked.
// Where nothing was written or deleted beside it, links resolved, it is the disk's own. A thread that
// Python does not know never asks, as the one that has Python's lock may be waiting for it: it sees
// what was written, and what was deleted, too.
std::optional<std::string> known_place(const char* path) {
  const std::string_view text(path);
  const std::size_t slash = text.rfind('/');
  const std::string folder(slash == text.npos ? "." : text.substr(0, slash + 1));
  const bool may_ask = PyGILState_GetThisThreadState() != nullptr;
  const std::string& written = *overlay.load();
  char resolved[PATH_MAX];
  const bool on_disk = ::realpath(folder.c_str(), resolved) != nullptr &&
                       !std::string_view(resolved).starts_with(written);
  if (may_ask && !on_disk) return std::nullopt;
  const std::string beside = written + (on_disk ? resolved : absolute(folder));
  if (::access(beside.c_str(), F_OK) != 0) return path;
  if (may_ask) return std::nullopt;
  const std::string there = beside + "/" + std::string(text.substr(slash + 1));
  return ::access(there.c_str(), F_OK) == 0 ? there : path;
}

// An exception that came while a call was answered and has nothing to do with it, as of a signal's
// handler: raised again in the main thread.
std::atomic<PyObject*> passed_on{nullptr};

int raise_again(void*) {
  PyObject* error = passed_on.exchange(nullptr);
  if (error == nullptr) return 0;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

// A path as an argument: made an object of Python's where its lock is held.
struct Path {
  const char* text;
};

nb::bytes as_argument(Path path) { return nb::bytes(path.text); }

template <typename Number>
Number as_argument(Number number) {
  return number;
}

struct Done {};

// The answer of one of Python's functions as a T; none, with `errno` set, where it raises.
template <typename T, typename... Arguments>
std::optional<T> ask(const char* function, const char* path, Arguments... arguments) {
  int number = EIO;
  {
    const InPython python;
    try {
      nb::object answer =
          nb::borrow(answers.load()).attr(function)(nb::bytes(path), as_argument(arguments)...);
      if constexpr (std::is_same_v<T, std::string>) {
        return std::string(nb::cast<nb::bytes>(answer).c_str());
      } else if constexpr (std::is_same_v<T, Done>) {
        return Done{};
      } else {
        return nb::cast<T>(answer);
      }
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_OSError)) {
        number = nb::cast<int>(error.value().attr("errno"));
      } else {
        Py_XDECREF(passed_on.exchange(error.value().inc_ref().ptr()));
        Py_AddPendingCall(raise_again, nullptr);
      }
    }
  }
  errno = number;
  return std::nullopt;
}

// Calls `use` with the path that leads to what is to be read.
template <typename Result, typename Use>
Result at(const char* path, bool follow, Result failed, Use use) {
  if (!asks(path)) return use(path);
  auto found = known_place(path);
  if (!found) found = ask<std::string>("found", path, follow);
  return found ? use(found->c_str()) : failed;
}

template <typename... Arguments>
int changed(const char* function, const char* path, Arguments... arguments) {
  return ask<Done>(function, path, arguments...) ? 0 : -1;
}

bool is_path(int directory, const char* path) {
  return directory == AT_FDCWD || (path != nullptr && *path == '/');
}

int open_as(const char* path, int flags, mode_t mode) {
  const bool reads = (flags & (O_ACCMODE | O_CREAT | O_TRUNC)) == O_RDONLY &&
                     (flags & O_TMPFILE) != O_TMPFILE;
  if (!asks(path)) return ::open(path, flags, mode);
  if (reads) {
    if (const auto place = known_place(path)) return ::open(place->c_str(), flags, mode);
  }
  return ask<int>("open", path, flags, mode).value_or(-1);
}

mode_t mode_after(int flags, va_list rest) {
  const bool given = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return given ? va_arg(rest, mode_t) : 0;
}

extern "C" {

int taken_open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_after(flags, rest);
  va_end(rest);
  return open_as(path, flags, mode);
}

int taken_openat(int directory, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_after(flags, rest);
  va_end(rest);
  return is_path(directory, path) ? open_as(path, flags, mode)
                                  : ::openat(directory, path, flags, mode);
}

int taken_open_2(const char* path, int flags) { return open_as(path, flags, 0); }

int taken_creat(const char* path, mode_t mode) {
  return open_as(path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

FILE* taken_fopen(const char* path, const char* mode) {
  if (!asks(path)) return ::fopen(path, mode);
  const std::string_view text(mode);
  int flags = text.find('+') != text.npos ? O_RDWR : text[0] == 'r' ? O_RDONLY : O_WRONLY;
  if (text[0] != 'r') flags |= O_CREAT | (text[0] == 'a' ? O_APPEND : O_TRUNC);
  if (text.find('x') != text.npos) flags |= O_EXCL;
  const int file = open_as(path, flags, 0666);
  return file < 0 ? nullptr : ::fdopen(file, mode);
}

DIR* taken_opendir(const char* path) {
  return at(path, true, static_cast<DIR*>(nullptr), [](const char* p) { return ::opendir(p); });
}

int taken_stat(const char* path, struct stat* status) {
  return at(path, true, -1, [=](const char* p) { return ::stat(p, status); });
}

int taken_lstat(const char* path, struct stat* status) {
  return at(path, false, -1, [=](const char* p) { return ::lstat(p, status); });
}

// What programs built with a C library before 2.33 call.
int taken_xstat(int, const char* path, struct stat* status) { return taken_stat(path, status); }
int taken_lxstat(int, const char* path, struct stat* status) { return taken_lstat(path, status); }

int taken_fstatat(int directory, const char* path, struct stat* status, int flags) {
  if (!is_path(directory, path)) return ::fstatat(directory, path, status, flags);
  return at(path, (flags & AT_SYMLINK_NOFOLLOW) == 0, -1,
            [=](const char* p) { return ::fstatat(directory, p, status, flags); });
}

int taken_statx(int directory, const char* path, int flags, unsigned mask, struct statx* status) {
  if (!is_path(directory, path)) return ::statx(directory, path, flags, mask, status);
  return at(path, (flags & AT_SYMLINK_NOFOLLOW) == 0, -1,
            [=](const char* p) { return ::statx(directory, p, flags, mask, status); });
}

int taken_access(const char* path, int mode) {
  return at(path, true, -1, [=](const char* p) { return ::access(p, mode); });
}

int taken_unlink(const char* path) {
  return asks(path) ? changed("unlink", path) : ::unlink(path);
}

int taken_unlinkat(int directory, const char* path, int flags) {
  if (!is_path(directory, path) || !asks(path)) return ::unlinkat(directory, path, flags);
  return changed((flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlink", path);
}

int taken_rmdir(const char* path) { return asks(path) ? changed("rmdir", path) : ::rmdir(path); }

int taken_remove(const char* path) {
  if (!asks(path)) return ::remove(path);
  struct stat status;
  if (taken_lstat(path, &status) != 0) return -1;
  return changed(S_ISDIR(status.st_mode) ? "rmdir" : "unlink", path);
}

int taken_mkdir(const char* path, mode_t mode) {
  return asks(path) ? changed("mkdir", path, mode) : ::mkdir(path, mode);
}

int taken_chmod(const char* path, mode_t mode) {
  return asks(path) ? changed("chmod", path, mode) : ::chmod(path, mode);
}

int taken_truncate(const char* path, off_t length) {
  return asks(path) ? changed("truncate", path, length) : ::truncate(path, length);
}

int taken_renameat(int from, const char* path, int to, const char* target) {
  const bool are_paths = is_path(from, path) && is_path(to, target);
  if (!are_paths || !(asks(path) || asks(target))) return ::renameat(from, path, to, target);
  return changed("rename", path, Path{target});
}

int taken_rename(const char* path, const char* target) {
  return taken_renameat(AT_FDCWD, path, AT_FDCWD, target);
}

int taken_linkat(int from, const char* path, int to, const char* target, int flags) {
  const bool are_paths = is_path(from, path) && is_path(to, target);
  if (!are_paths || !asks(target)) return ::linkat(from, path, to, target, flags);
  return changed("link", path, Path{target});
}

int taken_link(const char* path, const char* target) {
  return taken_linkat(AT_FDCWD, path, AT_FDCWD, target, 0);
}

int taken_symlink(const char* text, const char* path) {
  return asks(path) ? changed("symlink", text, Path{path}) : ::symlink(text, path);
}

void look_again();

// A name without a slash is looked for where the caller's own file says, so the call must come from
// there: the compiler makes it a jump. What it loads is looked through after the next one.
void* taken_dlopen(const char* path, int flags) {
  if (path == nullptr || std::strchr(path, '/') == nullptr) return ::dlopen(path, flags);
  void* library = at(path, true, static_cast<void*>(nullptr),
                     [=](const char* p) { return ::dlopen(p, flags); });
  if (library != nullptr) look_again();
  return library;
}

}  // extern "C"

// On 64-bit Linux the functions for large files have the same arguments as the others.
const Functions& taken() {
  const auto as = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const Functions functions{
      {"open", as(taken_open)},           {"open64", as(taken_open)},
      {"openat", as(taken_openat)},       {"openat64", as(taken_openat)},
      {"__open_2", as(taken_open_2)},     {"__open64_2", as(taken_open_2)},
      {"creat", as(taken_creat)},         {"creat64", as(taken_creat)},
      {"fopen", as(taken_fopen)},         {"fopen64", as(taken_fopen)},
      {"opendir", as(taken_opendir)},     {"stat", as(taken_stat)},
      {"stat64", as(taken_stat)},         {"lstat", as(taken_lstat)},
      {"lstat64", as(taken_lstat)},       {"__xstat", as(taken_xstat)},
      {"__xstat64", as(taken_xstat)},     {"__lxstat", as(taken_lxstat)},
      {"__lxstat64", as(taken_lxstat)},   {"fstatat", as(taken_fstatat)},
      {"fstatat64", as(taken_fstatat)},   {"statx", as(taken_statx)},
      {"access", as(taken_access)},       {"unlink", as(taken_unlink)},
      {"unlinkat", as(taken_unlinkat)},   {"rmdir", as(taken_rmdir)},
      {"remove", as(taken_remove)},       {"mkdir", as(taken_mkdir)},
      {"chmod", as(taken_chmod)},         {"truncate", as(taken_truncate)},
      {"truncate64", as(taken_truncate)}, {"rename", as(taken_rename)},
      {"renameat", as(taken_renameat)},   {"link", as(taken_link)},
      {"linkat", as(taken_linkat)},       {"symlink", as(taken_symlink)},
      {"dlopen", as(taken_dlopen)},
  };
  return functions;
}

extern "C" void look_again() {
  if (answers.load() != nullptr) write_functions(taken());
}

void take(nb::object answer, const std::string& written) {
  overlay.store(new std::string(written));
  answers.store(answer.release().ptr());
  look_again();
}

void give_back() {
  answers.store(nullptr);
  restore_functions();
}

}  // namespace

void bind_file_calls(nb::module_& module) {
  module.def("take_file_calls", &take, nb::arg("answers"), nb::arg("written"));
  module.def("give_back_file_calls", &give_back);
}

}  // namespace memplan::sandbox
