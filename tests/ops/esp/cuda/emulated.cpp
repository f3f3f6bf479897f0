// The kernels of recurrences.cu in a library for CPUs.
#include "emulator.h"

#define EMULATED
inline float power_of_2(float x) { return std::exp2(x); }
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
