// Threads of one step: one OpenMP region (the runtime torch itself uses, so that two pools never fight over the cores) with
// a barrier of our own. PM_BARRIER 1 spins PM_SPIN times, then blocks in the kernel: a thread that waits long uses no CPU.
// PM_BARRIER 0 is OpenMP's own barrier.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#ifndef PM_BARRIER
#define PM_BARRIER 1
#endif
#ifndef PM_SPIN
#define PM_SPIN 4000
#endif

static inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
#if PM_BARRIER == 0 && defined(_OPENMP)
#pragma omp barrier
#else
    const int seen = epoch_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      epoch_.store(seen + 1);
      if (sleepers_.load()) wake();
      return;
    }
    for (int i = 0; i < PM_SPIN; i++) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      pause_cpu();
    }
    sleepers_.fetch_add(1);
    while (epoch_.load() == seen) sleep(seen);
    sleepers_.fetch_sub(1);
#endif
  }

 private:
#ifdef __linux__
  void sleep(int seen) { syscall(SYS_futex, (int*)&epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, (int*)&epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(int) { std::this_thread::yield(); }
  void wake() {}
#endif
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

struct Range {
  int64_t begin, end, step = 1;
};

// The contiguous share of `count` things that belongs to thread `id`.
static inline Range share(int64_t count, int id, int threads) { return {count * id / threads, count * (id + 1) / threads}; }

// Runs f(id, threads) on up to `threads` threads and waits for all of them.
template <class F>
static inline void parallel(int threads, F&& f) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  f(0, 1);
}
