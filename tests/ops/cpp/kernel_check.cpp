// Compares kernels of a library with plain loops in double precision. Runs where there is no Python, for example under an
// emulator: kernel_check LIBRARY. Prints the largest error of each kernel, and returns 1 if one is too large.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "product8.h"
#include "small.h"

using namespace penstock;

void* library;
bool failed = false;

template <class Function>
Function function(const std::string& name) {
    void* found = dlsym(library, name.c_str());
    if (!found) { std::printf("missing: %s\n", name.c_str()); std::exit(2); }
    return reinterpret_cast<Function>(found);
}

using Kernel = decltype(GraphNode::kernel);

float as_float(float x) { return x; }
float as_float(BFloat16 x) { uint16_t bits; std::memcpy(&bits, &x, 2); uint32_t wide = uint32_t(bits) << 16; float to; std::memcpy(&to, &wide, 4); return to; }
void set(float& to, float x) { to = x; }
void set(BFloat16& to, float x) { uint32_t bits; std::memcpy(&bits, &x, 4); uint16_t high = (bits + 0x8000) >> 16; std::memcpy(&to, &high, 2); }

template <class T>
std::vector<T> drawn(size_t count, uint32_t seed) {
    std::vector<T> values(count);
    for (auto& value : values) {
        seed = seed * 1664525 + 1013904223;
        set(value, float(seed >> 8) / (1 << 23) - 1);
    }
    return values;
}

void launch(const std::string& name, const void* operands, int64_t tokens) {
    auto* pool = function<void* (*)(int64_t)>("open_pool")(2);
    Step step{};
    step.num_tokens = tokens;
    GraphNode node{function<Kernel>(name), operands};
    function<void (*)(void*, const GraphNode*, int64_t, const Step*)>("run")(pool, &node, 1, &step);
    function<void (*)(void*)>("close_pool")(pool);
}

void compare(const std::string& name, double error, double limit) {
    std::printf("%s: %.2g of %.2g\n", name.c_str(), error, limit);
    if (!(error <= limit)) failed = true;
}

template <class T>
void check_norm(const std::string& dtype, double limit) {
    const int64_t tokens = 5, size = 96;
    auto x = drawn<T>(tokens * size, 1), weight = drawn<T>(size, 2), out = drawn<T>(tokens * size, 3);
    NormOperands operands{};
    operands.x = x.data(); operands.weight = weight.data(); operands.out = out.data();
    operands.lines = 1; operands.stride = operands.size = size; operands.eps = 1e-6f;
    launch("norm_" + dtype, &operands, tokens);
    double error = 0;
    for (int64_t token = 0; token < tokens; token++) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++) squares += std::pow(as_float(x[token * size + i]), 2);
        for (int64_t i = 0; i < size; i++) {
            double wanted = as_float(x[token * size + i]) / std::sqrt(squares / size + 1e-6) * as_float(weight[i]);
            error = std::fmax(error, std::fabs(wanted - as_float(out[token * size + i])));
        }
    }
    compare("norm_" + dtype, error, limit);
}

template <class T>
void check_product(const std::string& dtype, int64_t rows, double limit, double limit8) {
    const int64_t in = 128, out_size = 80, panel = function<int64_t (*)()>("panel_width")();
    const int64_t unit = function<int64_t (*)()>("byte_step")();
    const int64_t padded = (out_size + panel - 1) / panel * panel, depth = (in + unit - 1) / unit * unit;
    auto x = drawn<T>(rows * in, 4), weight = drawn<T>(out_size * in, 5), out = drawn<T>(rows * out_size, 6);
    std::vector<double> wanted(rows * out_size);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t o = 0; o < out_size; o++)
            for (int64_t i = 0; i < in; i++)
                wanted[row * out_size + o] += double(as_float(x[row * in + i])) * as_float(weight[o * in + i]);
    auto error = [&] {
        double most = 0;
        for (size_t i = 0; i < wanted.size(); i++) most = std::fmax(most, std::fabs(wanted[i] - as_float(out[i])));
        return most;
    };
    auto* packed = static_cast<T*>(std::aligned_alloc(64, padded * in * sizeof(T)));
    PackOperands pack{weight.data(), packed, in, out_size};
    launch("pack_" + dtype, &pack, 0);
    ProductOperands product{};
    product.x = x.data(); product.x_stride = in; product.rows = rows; product.weight = packed;
    product.out = out.data(); product.in_size = in; product.out_size = out_size;
    launch("product_" + dtype, &product, rows);
    compare("product_" + dtype + ", rows: " + std::to_string(rows), error(), limit);

    auto* packed8 = static_cast<uint8_t*>(std::aligned_alloc(64, padded * depth));
    std::vector<float> scales(padded);
    Pack8Operands pack8{weight.data(), packed8, scales.data(), in, out_size};
    launch("pack8_" + dtype, &pack8, 0);
    auto* rounded = static_cast<int8_t*>(std::aligned_alloc(64, (rows + 1) * (depth + unit)));
    product.weight = packed8;
    Product8Operands product8{product, scales.data(), rounded};
    launch("product8_" + dtype, &product8, rows);
    compare("product8_" + dtype + ", rows: " + std::to_string(rows), error(), limit8);
    std::free(packed); std::free(packed8); std::free(rounded);
}

int main(int, char** arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) { std::printf("%s\n", dlerror()); return 2; }
    std::printf("%s\n", function<const char* (*)()>("instruction_set")());
    check_norm<float>("float32", 1e-5);
    check_norm<BFloat16>("bfloat16", 2e-2);
    for (int64_t rows : {1, 3, 40}) {
        check_product<float>("float32", rows, 1e-4, 0.15);
        check_product<BFloat16>("bfloat16", rows, 0.1, 0.2);
    }
    return failed;
}
