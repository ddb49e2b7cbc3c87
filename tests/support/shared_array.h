#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace tessera::test {

/// Zeroed elements that this process and those that it forks later see alike: how ranks leave results for the test that
/// started them.
template <class T>
class SharedArray {
 public:
  explicit SharedArray(size_t size) : size_(size) {
    void* mapped = mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(mapped);
  }
  SharedArray(SharedArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  SharedArray& operator=(SharedArray&&) = delete;
  ~SharedArray() {
    if (data_ != nullptr) munmap(data_, size_ * sizeof(T));
  }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_;
  size_t size_;
};

}  // namespace tessera::test
