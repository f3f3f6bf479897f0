// CUDA on a CPU, for tests: one block at a time, whose threads are fibers that wait at barriers,
// shuffles and ballots. Of those that need not wait the first one runs, or the last one: warps get
// as far ahead of each other as barriers allow, so that missing ones are noticed.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim {
    int x;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

__attribute__((aligned(16))) char shared[512 << 10];
Dim threadIdx, blockIdx, blockDim;

namespace emulator {

struct Barrier {
    int arrived = 0, round = 0;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    const Barrier* barrier = nullptr;  // that it waits at, in this round
    int round = 0;
    bool runs() const { return !done && (!barrier || barrier->round != round); }
};

std::vector<Fiber> fibers;
std::vector<Barrier> warps;
std::vector<uint32_t> exchanged;
Barrier block;
ucontext_t scheduler;
int current;
void (*body)();

void wait(Barrier& barrier, int count) {
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.round;
    } else {
        fibers[current].barrier = &barrier;
        fibers[current].round = barrier.round;
    }
    // Also the last one to arrive: others may go first.
    swapcontext(&fibers[current].context, &scheduler);
}

void wait_for_warp() { wait(warps[threadIdx.x / 32], 32); }

uint32_t exchange(uint32_t x, int lane) {
    exchanged[threadIdx.x] = x;
    wait_for_warp();
    const uint32_t found = exchanged[threadIdx.x / 32 * 32 + lane];
    wait_for_warp();
    return found;
}

void start() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

void run(int blocks, int threads, bool last_first, void (*kernel)()) {
    body = kernel;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        // What is not written must not be read.
        std::memset(shared, 0xff, sizeof(shared));
        fibers = std::vector<Fiber>(threads);
        warps.assign(threads / 32, {});
        exchanged.assign(threads, 0);
        block = {};
        for (Fiber& fiber : fibers) {
            fiber.stack.resize(128 << 10);
            getcontext(&fiber.context);
            fiber.context.uc_stack = {.ss_sp = fiber.stack.data(), .ss_flags = 0,
                                      .ss_size = fiber.stack.size()};
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, start, 0);
        }
        for (int i = 0; i < threads;) {
            current = last_first ? threads - 1 - i : i;
            Fiber& fiber = fibers[current];
            if (!fiber.runs()) {
                ++i;
                continue;
            }
            fiber.barrier = nullptr;
            threadIdx.x = current;
            swapcontext(&scheduler, &fiber.context);
            i = 0;
        }
        for (const Fiber& fiber : fibers) {
            if (!fiber.done) std::abort();  // a barrier that some threads did not come to
        }
    }
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::block, blockDim.x); }
inline void __syncwarp() { emulator::wait_for_warp(); }
inline float __uint_as_float(uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float __shfl_sync(uint32_t, float x, int lane) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return __uint_as_float(emulator::exchange(bits, lane));
}
inline float __shfl_xor_sync(uint32_t mask, float x, int away) {
    return __shfl_sync(mask, x, (threadIdx.x % 32) ^ away);
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
    emulator::exchanged[threadIdx.x] = x;
    emulator::wait_for_warp();
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        bits |= emulator::exchanged[threadIdx.x / 32 * 32 + lane] << lane;
    }
    emulator::wait_for_warp();
    return bits;
}
template <typename T>
inline T __ldg(const T* x) {
    return *x;
}
inline void atomicAdd(float* to, float x) { *to += x; }
template <typename T>
inline T min(T x, T y) {
    return x < y ? x : y;
}
