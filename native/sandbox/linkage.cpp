#include "sandbox/linkage.hpp"

#include <Python.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <string>
#include <vector>

namespace memplan::sandbox {
namespace {

#if defined(__x86_64__)
constexpr std::uint64_t kSlotTypes[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#elif defined(__aarch64__)
constexpr std::uint64_t kSlotTypes[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#else
constexpr std::uint64_t kSlotTypes[] = {~std::uint64_t{0}};  // none: nothing is written
#endif

// Visits the entries of one loaded object that name a function which is taken.
class Object {
 public:
  explicit Object(const dl_phdr_info& info) : base_(info.dlpi_addr) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr) & part = info.dlpi_phdr[i];
      const std::uintptr_t start = base_ + part.p_vaddr;
      if (part.p_type == PT_LOAD) {
        python_ |= holds(start, part, reinterpret_cast<void*>(&PyObject_Call));
        kept_ |= holds(start, part, reinterpret_cast<void*>(&write_functions)) ||
                 holds(start, part, dlsym(RTLD_DEFAULT, "open"));
      } else if (part.p_type == PT_GNU_RELRO) {
        sealed_ = start;
        sealed_end_ = start + part.p_memsz;
      } else if (part.p_type == PT_DYNAMIC) {
        read(reinterpret_cast<const ElfW(Dyn)*>(start));
      }
    }
  }

  // `visit(slot, function)` for each entry; none of the C library's and of this module's. Python's
  // own calls were seen to by Python, but for its loading of modules.
  template <typename Visit>
  void each(const Functions& functions, Visit visit) const {
    if (kept_ || strings_ == nullptr || symbols_ == nullptr) return;
    each_of(calls_, calls_bytes_, functions, visit);
    each_of(data_, data_bytes_, functions, visit);
  }

  // Writes an entry, also one that the linker has made read-only.
  void write(void** slot, void* value) const {
    const auto place = reinterpret_cast<std::uintptr_t>(slot);
    const auto size = static_cast<std::uintptr_t>(getpagesize());
    void* page = reinterpret_cast<void*>(place & ~(size - 1));
    const bool sealed = place >= sealed_ && place < sealed_end_;
    if (sealed && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) return;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (sealed) mprotect(page, size, PROT_READ);
  }

 private:
  static bool holds(std::uintptr_t start, const ElfW(Phdr) & part, void* address) {
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    return place >= start && place < start + part.p_memsz;
  }

  void read(const ElfW(Dyn) * entry) {
    const auto pointer = [&](ElfW(Addr) value) { return value < base_ ? value + base_ : value; };
    for (; entry->d_tag != DT_NULL; ++entry) {
      const ElfW(Addr) value = entry->d_un.d_ptr;
      switch (entry->d_tag) {
        case DT_STRTAB: strings_ = reinterpret_cast<const char*>(pointer(value)); break;
        case DT_SYMTAB: symbols_ = reinterpret_cast<const ElfW(Sym)*>(pointer(value)); break;
        case DT_JMPREL: calls_ = reinterpret_cast<const ElfW(Rela)*>(pointer(value)); break;
        case DT_PLTRELSZ: calls_bytes_ = entry->d_un.d_val; break;
        case DT_RELA: data_ = reinterpret_cast<const ElfW(Rela)*>(pointer(value)); break;
        case DT_RELASZ: data_bytes_ = entry->d_un.d_val; break;
        default: break;
      }
    }
  }

  template <typename Visit>
  void each_of(const ElfW(Rela) * rows, std::size_t bytes, const Functions& functions,
               Visit visit) const {
    for (std::size_t i = 0; rows != nullptr && i < bytes / sizeof(*rows); ++i) {
      const ElfW(Rela) & row = rows[i];
      const std::uint64_t type = ELF64_R_TYPE(row.r_info);
      if (ELF64_R_SYM(row.r_info) == 0 || row.r_addend != 0) continue;
      if (std::ranges::find(kSlotTypes, type) == std::end(kSlotTypes)) continue;
      const std::string_view name(strings_ + symbols_[ELF64_R_SYM(row.r_info)].st_name);
      const auto found = functions.find(name);
      if (found != functions.end() && (!python_ || name == "dlopen")) {
        visit(reinterpret_cast<void**>(base_ + row.r_offset), found->second);
      }
    }
  }

  std::uintptr_t base_;
  std::uintptr_t sealed_ = 0, sealed_end_ = 0;
  bool python_ = false, kept_ = false;
  const char* strings_ = nullptr;
  const ElfW(Sym) * symbols_ = nullptr;
  const ElfW(Rela) *calls_ = nullptr, *data_ = nullptr;
  std::size_t calls_bytes_ = 0, data_bytes_ = 0;
};

struct Entry {
  void** slot;
  void* before;
  void* now;
};

struct Written {
  std::string name;
  std::vector<Entry> entries;
};

// What was written into each object, by its address; another one may be loaded there later.
std::mutex writing;
std::unordered_map<ElfW(Addr), Written> written;
unsigned long long objects_seen = 0;

int write_into(dl_phdr_info* info, std::size_t, void* functions) {
  if (objects_seen == info->dlpi_adds) return 1;
  const auto [known, is_new] = written.try_emplace(info->dlpi_addr);
  if (!is_new && known->second.name == info->dlpi_name) return 0;
  known->second = {info->dlpi_name, {}};
  const Object object(*info);
  object.each(*static_cast<const Functions*>(functions), [&](void** slot, void* function) {
    known->second.entries.push_back({slot, *slot, function});
    object.write(slot, function);
  });
  return 0;
}

int restore_in(dl_phdr_info* info, std::size_t, void*) {
  const auto known = written.find(info->dlpi_addr);
  if (known == written.end() || known->second.name != info->dlpi_name) return 0;
  const Object object(*info);
  for (const Entry& entry : known->second.entries) {
    if (*entry.slot == entry.now) object.write(entry.slot, entry.before);
  }
  return 0;
}

int count_objects(dl_phdr_info* info, std::size_t, void* into) {
  *static_cast<unsigned long long*>(into) = info->dlpi_adds;
  return 1;
}

}  // namespace

void write_functions(const Functions& functions) {
  const std::unique_lock lock(writing, std::try_to_lock);  // it may be held where a child forked
  if (!lock) return;
  unsigned long long now = 0;
  dl_iterate_phdr(count_objects, &now);
  dl_iterate_phdr(write_into, const_cast<Functions*>(&functions));
  objects_seen = now;
}

void restore_functions() {
  const std::lock_guard lock(writing);
  dl_iterate_phdr(restore_in, nullptr);
  written.clear();
  objects_seen = 0;
}

}  // namespace memplan::sandbox
