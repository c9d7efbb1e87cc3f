// Scratch memory of one call.
#pragma once
#include "simd.hpp"

class Bump {  // hands out aligned pieces of one allocation; with a null base it only counts
 public:
  explicit Bump(void* base) : base_((char*)base) {}
  template <class T>
  T* take(int64_t count) {
    T* p = (T*)(base_ + used_);
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};
