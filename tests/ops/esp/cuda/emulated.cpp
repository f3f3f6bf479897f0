// The kernels of recurrences.cu in a library for CPUs.
#include "emulator.h"

#define EMULATED

// As inexact as on a GPU: half a unit of 2^-22 too large or too small.
inline float power_of_2(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    const float off = bits * 2654435761u >> 31 ? 1.2e-7f : -1.2e-7f;
    return std::exp2(x) * (x == 0.f ? 1.f : 1.f + off);
}
#include SOURCE

namespace {
Arguments call;
}

extern "C" void launch(
    const char* name, int blocks, int threads, bool last_first, const Arguments* arguments) {
    call = *arguments;
    const bool applies = !std::strcmp(name, "apply_plans");
    const bool crosses = !std::strcmp(name, "cross_plans");
    void (*kernel)() = applies   ? [] { apply_plans(call); }
                       : crosses ? [] { cross_plans(call); }
                                 : [] { plan_gradients(call); };
    emulator::run(blocks, threads, last_first, kernel);
}
