// Soft plans of the absolute metric on float32 rows, and their gradients, as recurrences along the
// ranks. `recurrences.py` explains the method, compiles these kernels and launches them.
//
// The host defines:
//   KERNEL           which one is compiled: APPLY_PLANS, CROSS_PLANS or PLAN_GRADIENTS
//   COLUMNS          of the rows that a block works on at a time: 4, 8, 16, 32 or 64
//   WARPS            of a block
//   WITH_SCALES      whether there are key_scale and query_scale
//   WITH_QUERY_ROWS  whether the rows of the queries have a gradient, in plan_gradients
//   SCRATCH_BYTES, GRADIENT_SCRATCH_BYTES    the sizes of Scratch and GradientScratch

typedef unsigned int u32;
typedef long long i64;

constexpr int RANKS = 16;               // of a segment
constexpr int LANES = COLUMNS / 2;      // of a segment: each has two columns
constexpr int SEGMENTS = 32 / LANES;    // of a warp
constexpr int SPAN = RANKS * SEGMENTS;  // ranks of a warp
__device__ constexpr int log_2(int x) { return x == 1 ? 0 : 1 + log_2(x / 2); }
constexpr int LEVELS = log_2(SEGMENTS);
constexpr u32 ALL = 0xffffffffu;

// ---- two neighbouring columns of a row ----------------------------------------------------------

struct __align__(8) Pair {
    float a, b;
};

__device__ __forceinline__ Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
__device__ __forceinline__ Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
__device__ __forceinline__ Pair operator*(Pair x, float y) { return {x.a * y, x.b * y}; }
__device__ __forceinline__ float dot(Pair x, Pair y, float sum) {
    return fmaf(x.a, y.a, fmaf(x.b, y.b, sum));
}
__device__ __forceinline__ Pair multiply_add(Pair x, float y, Pair sum) {
    return {fmaf(x.a, y, sum.a), fmaf(x.b, y, sum.b)};
}
__device__ __forceinline__ Pair from_lane(Pair x, int lane) {
    return {__shfl_sync(ALL, x.a, lane), __shfl_sync(ALL, x.b, lane)};
}

#ifndef EMULATED  // a single instruction; tests on a CPU have a function
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---- where a thread is --------------------------------------------------------------------------

__device__ __forceinline__ int warp_of_block() { return threadIdx.x >> 5; }
__device__ __forceinline__ int lane_of_warp() { return threadIdx.x & 31; }
__device__ __forceinline__ int segment_of_warp() { return lane_of_warp() / LANES; }
__device__ __forceinline__ int first_rank() {
    return warp_of_block() * SPAN + segment_of_warp() * RANKS;
}

// ---- arguments ----------------------------------------------------------------------------------

// In the order of `recurrences.py`. What a kernel does not need may be null.
struct Arguments {
    // Plans, by (head, slice) and rank.
    const int *query_order, *key_order;
    const float *query_points, *key_points, *mid_scale, *query_scale, *key_scale;
    const float *inv_bandwidth;  // by head
    const float *weight;         // by (head, slice)
    const float *x, *g;          // rows of the keys and of the queries, by head and token
    float* out;                  // what plans are added to, like g
    float *dx, *dg;
    // Gradients, by (head, slice) and rank.
    float *d_query_points, *d_key_points, *d_mid_scale, *d_query_scale, *d_key_scale;
    float *totals;  // ⟨g, plan x⟩ without the weight, by (head, slice)
    int ranks, queries, keys, width;
    int slices;   // of a head
    int at_once;  // slices of a block
    int blocks;   // of a head
};

// ---- the sides of a slice -----------------------------------------------------------------------

constexpr float LOG2E = 1.4426950408889634f;
constexpr int KEYS = 0, QUERIES = 1;
constexpr int ENTRIES = SPAN / 16;  // ranks of a warp that a lane fetches, of both sides together

// What a warp keeps of one side in shared memory.
struct Ranks {
    float decay[SPAN];  // from the rank before
    u32 row[SPAN];      // where the row of its token begins, in bytes
    u32 slot[SPAN];     // where it begins in a tile, in bytes
    float scale[WITH_SCALES ? SPAN : 4];
    float point[SEGMENTS > 1 ? SPAN : 4];
    float warp_decay[(WARPS + 3) / 4 * 4];  // between this warp and every other
};

struct Tables {
    Ranks sides[2];
    float mid_scale[SPAN];
};

// What a lane knows of its segment on one side.
struct Side {
    const Ranks* ranks;
    u32 ties;            // bit i: rank i has the point of the rank before it; bit RANKS: so has the
                         // first rank of the next segment
    float before[LEVELS + 1], behind[LEVELS + 1];  // decays from segments 1, 1, 2, 4, ... away
    float from_first, to_last;  // decay from the first rank of the warp, and to its last rank
    float within;               // decay from the first to the last rank of the segment
};

struct Sides {
    Side keys, queries;
};

__device__ __forceinline__ float point_at(const float* points, int n, int N) {
    return points[n < 0 ? 0 : n < N ? n : N - 1];
}

// What a lane has read of the ranks of its warp on both sides, the keys first. It is read before
// it is needed, while the slice before is computed.
struct Fetched {
    float point[ENTRIES], previous[ENTRIES];
    int token[ENTRIES];
    float scale[WITH_SCALES ? ENTRIES : 1];
    float mid_scale[ENTRIES];
    float facing[2];  // the nearest point of the warp that has the number of this lane
    float weight;
};

__device__ __forceinline__ Fetched fetch(const Arguments& call, i64 pair) {
    const int lane = lane_of_warp(), w = warp_of_block(), first = w * SPAN, N = call.ranks;
    const i64 offset = pair * N;
    Fetched found;
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const int entry = 32 * i + lane;
        const bool queries = entry >= SPAN;
        const int n = first + entry % SPAN;
        const float* points = (queries ? call.query_points : call.key_points) + offset;
        const int* order = (queries ? call.query_order : call.key_order) + offset;
        const bool here = n < N;
        found.point[i] = points[here ? n : N - 1];
        found.previous[i] = points[n == 0 ? 0 : here ? n - 1 : N - 1];
        found.token[i] = here ? order[n] : -1;
        if (WITH_SCALES) {
            const float* scale = (queries ? call.query_scale : call.key_scale) + offset;
            found.scale[i] = here ? scale[n] : 0.f;
        }
        found.mid_scale[i] = here && !queries ? call.mid_scale[offset + n] : 0.f;
    }
    const int nearest = lane < w ? (lane + 1) * SPAN - 1 : lane * SPAN;
    found.facing[KEYS] = point_at(call.key_points + offset, nearest, N);
    found.facing[QUERIES] = point_at(call.query_points + offset, nearest, N);
    found.weight = call.weight ? call.weight[pair] : 1.f;
    return found;
}

__device__ __forceinline__ float pick(const float (&x)[ENTRIES], int entry) {
    return __shfl_sync(ALL, x[entry / 32], entry % 32);
}

template <int SIDE>
__device__ __forceinline__ Side open_side(
    Ranks* ranks, const Fetched& fetched, const u32 (&ties)[ENTRIES], float rate) {
    const int lane = lane_of_warp(), s = segment_of_warp(), w = warp_of_block();
    const float first = pick(fetched.point, SIDE * SPAN);
    const float last = pick(fetched.point, SIDE * SPAN + SPAN - 1);
    const float facing = fetched.facing[SIDE];
    if (lane < WARPS) {
        ranks->warp_decay[lane] = power_of_2((lane < w ? facing - first : last - facing) * rate);
    }
    const bool next = __shfl_sync(ALL, facing, (w + 1) & 31) == last && w + 1 < WARPS;
    Side side;
    side.ranks = ranks;
    const int entry = SIDE * SPAN + s * RANKS;
    u32 own = ties[0];
#pragma unroll
    for (int i = 1; i < ENTRIES; ++i) own = entry / 32 == i ? ties[i] : own;
    side.ties = own >> entry % 32 & ((1u << RANKS) - 1);
    if (SEGMENTS == 1) {
        side.ties |= next ? 1u << RANKS : 0;
        return side;
    }
    const float* points = ranks->point + s * RANKS;
    const float begin = points[0], end = points[RANKS - 1];
    const bool tied = s < SEGMENTS - 1 ? points[RANKS] == end : next;
    side.ties |= tied ? 1u << RANKS : 0;
    side.from_first = power_of_2((first - begin) * rate);
    side.to_last = power_of_2((end - last) * rate);
    side.within = power_of_2((begin - end) * rate);
    side.before[0] = s ? power_of_2((points[-1] - begin) * rate) : 0.f;
    side.behind[0] = s < SEGMENTS - 1 ? power_of_2((end - points[RANKS]) * rate) : 0.f;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const int away = 1 << level;
        side.before[level + 1] =
            s >= away ? power_of_2((points[-away * RANKS] - begin) * rate) : 0.f;
        side.behind[level + 1] =
            s + away < SEGMENTS
                ? power_of_2((end - points[RANKS - 1 + away * RANKS]) * rate)
                : 0.f;
    }
    return side;
}

// Ranks past the end have the last point and a row that is not read. What they add to a tile, and
// what ranks add that share a token with another one (with pieces; their scale is zero), goes to a
// spare slot after the others, which threads write in any order and nobody reads.
__device__ __forceinline__ Sides open_slice(
    Tables* tables, const Fetched& fetched, const Arguments& call, float rate) {
    const int lane = lane_of_warp(), first = warp_of_block() * SPAN;
    u32 ties[ENTRIES];
    __syncwarp();  // the slice before has been read
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
        const int entry = 32 * i + lane, n = entry % SPAN;
        const bool queries = entry >= SPAN;
        Ranks& ranks = tables->sides[queries];
        const float gap = fetched.previous[i] - fetched.point[i];
        const int token = fetched.token[i];
        ties[i] = __ballot_sync(ALL, gap == 0.f && first + n > 0);
        ranks.decay[n] = power_of_2(gap * rate);
        ranks.row[n] = (token < 0 ? 0 : token) * call.width * (u32)sizeof(float);
        bool present = token >= 0;
        if (WITH_SCALES) {
            ranks.scale[n] = fetched.scale[i];
            present = present && fetched.scale[i] != 0.f;
        }
        const int rows = queries ? call.queries : call.keys;
        ranks.slot[n] = (present ? token : rows) * COLUMNS * (u32)sizeof(float);
        if (SEGMENTS > 1) ranks.point[n] = fetched.point[i];
        if (!queries) tables->mid_scale[n] = fetched.mid_scale[i];
    }
    if (SEGMENTS > 1) __syncwarp();
    Sides sides;
    sides.keys = open_side<KEYS>(&tables->sides[KEYS], fetched, ties, rate);
    sides.queries = open_side<QUERIES>(&tables->sides[QUERIES], fetched, ties, rate);
    __syncwarp();
    return sides;
}

// Sixteen numbers of a segment.
template <typename T>
struct OfRanks {
    T x[RANKS];
    __device__ __forceinline__ T operator[](int i) const { return x[i]; }
};

template <typename T, typename Four>
__device__ __forceinline__ OfRanks<T> load_ranks(const T* shared) {
    OfRanks<T> found;
    const Four* fours = reinterpret_cast<const Four*>(shared + segment_of_warp() * RANKS);
#pragma unroll
    for (int i = 0; i < RANKS / 4; ++i) {
        const Four four = fours[i];
        found.x[4 * i] = four.x;
        found.x[4 * i + 1] = four.y;
        found.x[4 * i + 2] = four.z;
        found.x[4 * i + 3] = four.w;
    }
    return found;
}
__device__ __forceinline__ OfRanks<float> load_numbers(const float* shared) {
    return load_ranks<float, float4>(shared);
}
__device__ __forceinline__ OfRanks<u32> load_places(const u32* shared) {
    return load_ranks<u32, uint4>(shared);
}

// ---- rows of a segment --------------------------------------------------------------------------

// Rows of tokens, times their scales when they are read.
struct Rows {
    Pair row[RANKS];
    OfRanks<float> scale;
    __device__ __forceinline__ Pair raw(int i) const { return row[i]; }
    __device__ __forceinline__ Pair operator[](int i) const {
        return WITH_SCALES ? row[i] * scale[i] : row[i];
    }
};

__device__ __forceinline__ Rows load_rows(
    const float* rows, const Side& side, int column, int D, int N) {
    Rows found;
    const OfRanks<u32> place = load_places(side.ranks->row);
    const char* from = reinterpret_cast<const char*>(rows + column);
    const int count = column < D ? N - first_rank() : 0;
#pragma unroll
    for (int i = 0; i < RANKS; ++i) {
        found.row[i] = {0.f, 0.f};
        if (i < count) {
            const float2 row = __ldg(reinterpret_cast<const float2*>(from + place[i]));
            found.row[i] = {row.x, row.y};
        }
    }
    if (WITH_SCALES) found.scale = load_numbers(side.ranks->scale);
    return found;
}

// Rows that were computed.
struct Products {
    Pair x[RANKS];
    __device__ __forceinline__ Pair operator[](int i) const { return x[i]; }
};

// Adds a row to a slot of a tile. In a slice only one thread does so, but for the spare slot.
__device__ __forceinline__ void add_to_tile(float* tile, u32 slot, Pair row, float factor) {
    Pair* to = reinterpret_cast<Pair*>(
        reinterpret_cast<char*>(tile + lane_of_warp() % LANES * 2) + slot);
    *to = multiply_add(row, factor, *to);
}

// ---- sums over the ranks of other segments ------------------------------------------------------

// Of one operand: sums over all ranks before the first rank of a segment, and behind the last.
struct Carry {
    Pair left, right;
    Pair left_tied, right_tied;  // the parts of those from ranks with the same point
};

// What segments and warps tell each other about one operand.
struct Exchange {
    float left[WARPS][COLUMNS], right[WARPS][COLUMNS];  // totals of warps
};
struct TiedExchange {
    float left[WARPS * SEGMENTS][COLUMNS], right[WARPS * SEGMENTS][COLUMNS];
};

__device__ __forceinline__ Pair& at(float (*table)[COLUMNS], int row) {
    return *reinterpret_cast<Pair*>(&table[row][(lane_of_warp() % LANES) * 2]);
}

__device__ __forceinline__ Pair carry_in_warp(Pair total, const float* steps, int direction) {
    if (SEGMENTS == 1) return {0.f, 0.f};
    const int lane = lane_of_warp();
    Pair sum = from_lane(total, (lane + direction * LANES) & 31) * steps[0];
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const Pair more = from_lane(sum, (lane + direction * (LANES << level)) & 31);
        sum = multiply_add(more, steps[level + 1], sum);
    }
    return sum;
}

// Publishes the totals of an operand. The returned sums are those over segments of the same warp.
template <bool WITH_TIES, typename Operand>
__device__ __forceinline__ Carry publish(
    const Operand& x, const Side& side, Exchange* exchange, TiedExchange* tied) {
    const OfRanks<float> decay = load_numbers(side.ranks->decay);
    Pair left = x[0], right = x[RANKS - 1];
#pragma unroll
    for (int i = 1; i < RANKS; ++i) left = multiply_add(left, decay[i], x[i]);
#pragma unroll
    for (int i = RANKS - 2; i >= 0; --i) right = multiply_add(right, decay[i + 1], x[i]);
    Carry carry;
    carry.left = carry_in_warp(left, side.before, -1);
    carry.right = carry_in_warp(right, side.behind, 1);
    const int s = segment_of_warp(), w = warp_of_block();
    if (s == SEGMENTS - 1) {
        at(exchange->left, w) = SEGMENTS == 1 ? left : multiply_add(carry.left, side.within, left);
    }
    if (s == 0) {
        at(exchange->right, w) =
            SEGMENTS == 1 ? right : multiply_add(carry.right, side.within, right);
    }
    if (WITH_TIES) {
        if (side.ties >> RANKS & 1) {
            Pair sum = x[RANKS - 1];
            bool run = true;
#pragma unroll
            for (int i = RANKS - 1; i > 0; --i) {
                run = run && (side.ties >> i & 1);
                if (run) sum = sum + x[i - 1];
            }
            at(tied->left, w * SEGMENTS + s) = sum;
        }
        if (side.ties & 1) {
            Pair sum = x[0];
            bool run = true;
#pragma unroll
            for (int i = 1; i < RANKS; ++i) {
                run = run && (side.ties >> i & 1);
                if (run) sum = sum + x[i];
            }
            at(tied->right, w * SEGMENTS + s) = sum;
        }
    }
    return carry;
}

// Adds the sums over all other warps, after a barrier.
__device__ __forceinline__ void collect(Carry& carry, const Side& side, Exchange* exchange) {
    const int w = warp_of_block();
    Pair left = {0.f, 0.f}, right = {0.f, 0.f};
    for (int other = 0; other < w; ++other) {
        left = multiply_add(at(exchange->left, other), side.ranks->warp_decay[other], left);
    }
    for (int other = w + 1; other < WARPS; ++other) {
        right = multiply_add(at(exchange->right, other), side.ranks->warp_decay[other], right);
    }
    if (SEGMENTS == 1) {
        carry.left = left;
        carry.right = right;
    } else {
        carry.left = multiply_add(left, side.from_first, carry.left);
        carry.right = multiply_add(right, side.to_last, carry.right);
    }
}

// How many of the sorted points are below x, or equal to it if those count too.
__device__ __forceinline__ int count_below(const float* points, float x, bool equal_too, int N) {
    int begin = 0, end = N;
    while (begin < end) {
        const int middle = (begin + end) / 2;
        const bool below = equal_too ? points[middle] <= x : points[middle] < x;
        if (below) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// The parts of the sums that belong to equal points, from as many segments as share the point. If
// all ranks on a side do, the part is the sum itself, without rounding.
__device__ __forceinline__ void collect_ties(
    Carry& carry, const Side& side, TiedExchange* tied, const float* points, int N) {
    carry.left_tied = carry.right_tied = {0.f, 0.f};
    const int s = warp_of_block() * SEGMENTS + segment_of_warp();
    if (side.ties & 1) {
        const int first = count_below(points, point_at(points, s * RANKS, N), false, N);
        for (int other = first / RANKS; other < s; ++other) {
            carry.left_tied = carry.left_tied + at(tied->left, other);
        }
        if (first == 0) carry.left_tied = carry.left;
    }
    if (side.ties >> RANKS & 1) {
        const int end = count_below(points, point_at(points, (s + 1) * RANKS, N), true, N);
        for (int other = s + 1; end < N && other * RANKS < end; ++other) {
            carry.right_tied = carry.right_tied + at(tied->right, other);
        }
        if (end == N) carry.right_tied = carry.right;
    }
}

// κx.
template <typename Operand>
__device__ __forceinline__ Products times_kappa(
    const Operand& x, const Carry& carry, const Side& side) {
    const OfRanks<float> decay = load_numbers(side.ranks->decay);
    Products y;
    Pair left = carry.left + x[0];
    y.x[0] = left;
#pragma unroll
    for (int i = 1; i < RANKS; ++i) y.x[i] = left = multiply_add(left, decay[i], x[i]);
    Pair right = carry.right;
#pragma unroll
    for (int i = RANKS - 1; i >= 0; --i) {
        y.x[i] = y.x[i] + right;
        right = (right + x[i]) * decay[i];
    }
    return y;
}

// ---- sums over columns --------------------------------------------------------------------------

constexpr int KEPT = LANES >= RANKS ? 1 : RANKS / LANES;  // ranks of a lane after a reduction

// Sums over the lanes of a segment: this lane has those of ranks `reduced_rank() + 0 ... KEPT - 1`.
__device__ __forceinline__ void reduce(float (&x)[RANKS]) {
    const int lane = lane_of_warp();
    int count = RANKS;
#pragma unroll
    for (int away = LANES / 2; away > 0; away /= 2) {
        if (count > 1) {
            count /= 2;
            const bool upper = lane & away;
#pragma unroll
            for (int i = 0; i < RANKS / 2; ++i) {
                if (i < count) {
                    const float mine = upper ? x[i + count] : x[i];
                    const float other = upper ? x[i] : x[i + count];
                    x[i] = mine + __shfl_xor_sync(ALL, other, away);
                }
            }
        } else {
            x[0] += __shfl_xor_sync(ALL, x[0], away);
        }
    }
}

__device__ __forceinline__ int reduced_rank() {
    const int lane = lane_of_warp() % LANES;
    return LANES > RANKS ? lane * RANKS / LANES : lane * KEPT;
}
__device__ __forceinline__ bool has_reduced() {
    return LANES <= RANKS || lane_of_warp() % (LANES / RANKS > 0 ? LANES / RANKS : 1) == 0;
}

// Writes numbers by rank, or adds to them if they are not those of the first columns.
__device__ __forceinline__ void store_reduced(
    float* to, const float (&x)[RANKS], float factor, bool first_columns, int N) {
    if (!has_reduced()) return;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int n = first_rank() + reduced_rank() + i;
        if (n < N) to[n] = first_columns ? x[i] * factor : fmaf(x[i], factor, to[n]);
    }
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(ALL, x, away);
    return x;
}

// ---- tiles of rows that slices are added to -----------------------------------------------------

__device__ __forceinline__ void clear_tile(float* tile, int rows) {
    for (int i = threadIdx.x; i < rows * COLUMNS; i += blockDim.x) tile[i] = 0.f;
}

__device__ __forceinline__ void add_tile(
    float* out, const float* tile, int rows, int D, int start, bool atomic) {
    for (int i = threadIdx.x; i < rows * COLUMNS; i += blockDim.x) {
        const int row = i / COLUMNS, column = start + i % COLUMNS;
        if (column >= D) continue;
        float* to = out + (i64)row * D + column;
        if (atomic) {
            atomicAdd(to, tile[i]);
        } else {
            *to += tile[i];
        }
    }
}

// ---- kernels ------------------------------------------------------------------------------------

// What a block keeps in shared memory, before its tiles of rows.
struct Scratch {
    Tables tables[WARPS];
    Exchange of_rows[2], of_products[2];  // of x and g, and of what κ makes of them
};

static_assert(sizeof(Scratch) == SCRATCH_BYTES, "the host computes another size");

#define APPLY_PLANS 1
#define CROSS_PLANS 2
#define PLAN_GRADIENTS 3

#if KERNEL == APPLY_PLANS || defined(EMULATED)
// out += Σ_l weight_l · query_scale · κ_q (mid_scale · κ_k (key_scale · x))
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
apply_plans(const Arguments call) {
    extern __shared__ __align__(16) char shared[];
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    float* tile = reinterpret_cast<float*>(shared + sizeof(Scratch));
    const int head = blockIdx.x / call.blocks, part = blockIdx.x % call.blocks;
    const int N = call.ranks, D = call.width, w = warp_of_block();
    const float rate = call.inv_bandwidth[head] * LOG2E;
    const float* x = call.x + (i64)head * call.keys * D;
    float* out = call.out + (i64)head * call.queries * D;
    const int end = min(call.slices, (part + 1) * call.at_once);
    for (int start = 0; start < D; start += COLUMNS) {
        const int column = start + lane_of_warp() % LANES * 2;
        clear_tile(tile, call.queries);
        Fetched fetched = fetch(call, (i64)head * call.slices + part * call.at_once);
        for (int l = part * call.at_once; l < end; ++l) {
            const Sides sides = open_slice(&scratch.tables[w], fetched, call, rate);
            const Side &keys = sides.keys, &queries = sides.queries;
            const float weight = fetched.weight;
            if (l + 1 < end) fetched = fetch(call, (i64)head * call.slices + l + 1);
            Products y;
            {
                const Rows rows = load_rows(x, keys, column, D, N);
                Carry carry = publish<false>(rows, keys, &scratch.of_rows[0], nullptr);
                __syncthreads();
                collect(carry, keys, &scratch.of_rows[0]);
                y = times_kappa(rows, carry, keys);
            }
            {
                const OfRanks<float> mid_scale = load_numbers(scratch.tables[w].mid_scale);
#pragma unroll
                for (int i = 0; i < RANKS; ++i) y.x[i] = y.x[i] * mid_scale[i];
            }
            Carry carry = publish<false>(y, queries, &scratch.of_products[0], nullptr);
            __syncthreads();
            collect(carry, queries, &scratch.of_products[0]);
            y = times_kappa(y, carry, queries);
            const OfRanks<u32> slot = load_places(queries.ranks->slot);
            OfRanks<float> scale;
            if (WITH_SCALES) scale = load_numbers(queries.ranks->scale);
#pragma unroll
            for (int i = 0; i < RANKS; ++i) {
                add_to_tile(tile, slot[i], y[i], WITH_SCALES ? weight * scale[i] : weight);
            }
        }
        __syncthreads();
        add_tile(out, tile, call.queries, D, start, call.blocks > 1);
        __syncthreads();
    }
}
#endif

#if KERNEL == CROSS_PLANS || defined(EMULATED)
// totals = Σ_n mid_scale_n (κ_q (query_scale · g))_n · (κ_k (key_scale · x))_n for every slice
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
cross_plans(const Arguments call) {
    extern __shared__ __align__(16) char shared[];
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
    const int head = blockIdx.x / call.blocks, part = blockIdx.x % call.blocks;
    const int N = call.ranks, D = call.width, w = warp_of_block();
    const float rate = call.inv_bandwidth[head] * LOG2E;
    const float* x = call.x + (i64)head * call.keys * D;
    const float* g = call.g + (i64)head * call.queries * D;
    float* sums = reinterpret_cast<float*>(shared + sizeof(Scratch));  // by warp, for two slices
    const int begin = part * call.at_once, end = min(call.slices, begin + call.at_once);
    Fetched fetched = fetch(call, (i64)head * call.slices + begin);
    for (int l = begin; l < end; ++l) {
        const i64 pair = (i64)head * call.slices + l;
        const Sides sides = open_slice(&scratch.tables[w], fetched, call, rate);
        const Side &keys = sides.keys, &queries = sides.queries;
        if (l + 1 < end) fetched = fetch(call, pair + 1);
        float sum = 0.f;
        for (int start = 0; start < D; start += COLUMNS) {
            const int column = start + lane_of_warp() % LANES * 2;
            // Two exchanges in turn, so that one barrier is enough between blocks of columns.
            Exchange* exchange = start / COLUMNS % 2 ? scratch.of_products : scratch.of_rows;
            const Rows key_rows = load_rows(x, keys, column, D, N);
            const Rows query_rows = load_rows(g, queries, column, D, N);
            Carry of_keys = publish<false>(key_rows, keys, &exchange[0], nullptr);
            Carry of_queries = publish<false>(query_rows, queries, &exchange[1], nullptr);
            __syncthreads();
            collect(of_keys, keys, &exchange[0]);
            collect(of_queries, queries, &exchange[1]);
            const Products a = times_kappa(key_rows, of_keys, keys);
            const Products b = times_kappa(query_rows, of_queries, queries);
            const OfRanks<float> mid_scale = load_numbers(scratch.tables[w].mid_scale);
#pragma unroll
            for (int i = 0; i < RANKS; ++i) sum = fmaf(mid_scale[i], dot(a[i], b[i], 0.f), sum);
        }
        sum = sum_of_warp(sum);
        float* by_warp = sums + l % 2 * WARPS;
        if (lane_of_warp() == 0) by_warp[w] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int other = 1; other < WARPS; ++other) sum += by_warp[other];
            call.totals[pair] = sum;
        }
    }
}
#endif

#if KERNEL == PLAN_GRADIENTS || defined(EMULATED)
struct GradientScratch : Scratch {
    TiedExchange tied[4];
    Pair parked[RANKS][WARPS * 32];  // numbers of a thread that would not fit in its registers
};
static_assert(sizeof(GradientScratch) == GRADIENT_SCRATCH_BYTES, "the host computes another size");

// One side of the backward pass: forces on the points, x · κ'y + y · κ'x, from both operands; and,
// with scales, raw · κy. `pass` is called with every rank, the sum of y from the left or from the
// right without the rank itself, and whether it is the one from the right.
template <typename X, typename Y, typename Pass>
__device__ __forceinline__ void forces(
    float (&force)[RANKS], const X& x, const Carry& of_x, const Y& y, const Carry& of_y,
    const Side& side, Pass pass) {
    const OfRanks<float> decay = load_numbers(side.ranks->decay);
    Pair x_sum = of_x.left, y_sum = of_y.left;
    Pair x_untied = x_sum - of_x.left_tied, y_untied = y_sum - of_y.left_tied;
#pragma unroll
    for (int i = 0; i < RANKS; ++i) {
        if (i > 0) {
            x_sum = (x_sum + x[i - 1]) * decay[i];
            y_sum = (y_sum + y[i - 1]) * decay[i];
            if (!(side.ties >> i & 1)) x_untied = x_sum, y_untied = y_sum;
        }
        force[i] = -dot(x[i], y_untied, dot(y[i], x_untied, 0.f));
        pass(i, y_sum, false);
    }
    x_sum = of_x.right, y_sum = of_y.right;
    x_untied = x_sum - of_x.right_tied, y_untied = y_sum - of_y.right_tied;
#pragma unroll
    for (int i = RANKS - 1; i >= 0; --i) {
        if (i < RANKS - 1) {
            x_sum = (x_sum + x[i + 1]) * decay[i + 1];
            y_sum = (y_sum + y[i + 1]) * decay[i + 1];
            if (!(side.ties >> (i + 1) & 1)) x_untied = x_sum, y_untied = y_sum;
        }
        force[i] = dot(x[i], y_untied, dot(y[i], x_untied, force[i]));
        pass(i, y_sum, true);
    }
}

// Gradients of Σ_l weight_l ⟨g, plan_l x⟩: adds to dx, and to dg if it has a gradient.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
plan_gradients(const Arguments call) {
    extern __shared__ __align__(16) char shared[];
    GradientScratch& scratch = *reinterpret_cast<GradientScratch*>(shared);
    float* key_tile = reinterpret_cast<float*>(shared + sizeof(GradientScratch));
    float* query_tile = key_tile + (call.keys + 1) * COLUMNS;
    float* sums = query_tile + (WITH_QUERY_ROWS ? (call.queries + 1) * COLUMNS : 0);
    const int head = blockIdx.x / call.blocks, part = blockIdx.x % call.blocks;
    const int N = call.ranks, D = call.width, w = warp_of_block();
    const float inv_bandwidth = call.inv_bandwidth[head], rate = inv_bandwidth * LOG2E;
    const float* x = call.x + (i64)head * call.keys * D;
    const float* g = call.g + (i64)head * call.queries * D;
    const int end = min(call.slices, (part + 1) * call.at_once);
    for (int start = 0; start < D; start += COLUMNS) {
        const int column = start + lane_of_warp() % LANES * 2;
        if (call.dx) clear_tile(key_tile, call.keys);
        if (WITH_QUERY_ROWS) clear_tile(query_tile, call.queries);
        Fetched fetched = fetch(call, (i64)head * call.slices + part * call.at_once);
        for (int l = part * call.at_once; l < end; ++l) {
            const i64 pair = (i64)head * call.slices + l, ranks = pair * N;
            const Sides sides = open_slice(&scratch.tables[w], fetched, call, rate);
            const Side &keys = sides.keys, &queries = sides.queries;
            const float weight = fetched.weight;
            if (l + 1 < end) fetched = fetch(call, pair + 1);
            const Rows key_rows = load_rows(x, keys, column, D, N);
            const Rows query_rows = load_rows(g, queries, column, D, N);
            Carry of_keys = publish<true>(key_rows, keys, &scratch.of_rows[0], &scratch.tied[0]);
            Carry of_queries =
                publish<true>(query_rows, queries, &scratch.of_rows[1], &scratch.tied[1]);
            __syncthreads();
            collect(of_keys, keys, &scratch.of_rows[0]);
            collect(of_queries, queries, &scratch.of_rows[1]);
            // Before the next barrier, since the next slice writes there.
            collect_ties(of_keys, keys, &scratch.tied[0], call.key_points + ranks, N);
            collect_ties(of_queries, queries, &scratch.tied[1], call.query_points + ranks, N);
            // κ_k x and κ_q g would not fit in registers together, so one of them is parked.
            Products products = times_kappa(key_rows, of_keys, keys);
#pragma unroll
            for (int i = 0; i < RANKS; ++i) scratch.parked[i][threadIdx.x] = products[i];
            products = times_kappa(query_rows, of_queries, queries);
            {
                const OfRanks<float> mid_scale = load_numbers(scratch.tables[w].mid_scale);
                float dots[RANKS], sum = 0.f;
#pragma unroll
                for (int i = 0; i < RANKS; ++i) {
                    const float here = mid_scale[i];
                    dots[i] = dot(products[i], scratch.parked[i][threadIdx.x], 0.f);
                    if (here == 0.f) dots[i] = 0.f;
                    if (call.totals) sum = fmaf(here, dots[i], sum);
                    products.x[i] = products[i] * here;
                }
                if (call.d_mid_scale) {
                    reduce(dots);
                    store_reduced(call.d_mid_scale + ranks, dots, weight, start == 0, N);
                }
                if (call.totals) {
                    sum = sum_of_warp(sum);
                    if (lane_of_warp() == 0) sums[w] = sum;
                }
            }
            Carry of_back = publish<true>(products, keys, &scratch.of_products[1], &scratch.tied[3]);
            {
                const OfRanks<float> mid_scale = load_numbers(scratch.tables[w].mid_scale);
#pragma unroll
                for (int i = 0; i < RANKS; ++i) {
                    const Pair back = products[i];
                    products.x[i] = scratch.parked[i][threadIdx.x] * mid_scale[i];
                    scratch.parked[i][threadIdx.x] = back;
                }
            }
            Carry of_products =
                publish<true>(products, queries, &scratch.of_products[0], &scratch.tied[2]);
            __syncthreads();
            if (call.totals && threadIdx.x == 0) {
                float sum = start == 0 ? 0.f : call.totals[pair];
                for (int other = 0; other < WARPS; ++other) sum += sums[other];
                call.totals[pair] = sum;
            }
            collect(of_products, queries, &scratch.of_products[0]);
            collect_ties(of_products, queries, &scratch.tied[2], call.query_points + ranks, N);
            float force[RANKS], of_scale[RANKS];
            {
                const OfRanks<u32> slot = load_places(queries.ranks->slot);
                forces(
                    force, query_rows, of_queries, products, of_products, queries,
                    [&](int i, Pair sum, bool right) {
                        if (!WITH_QUERY_ROWS && !WITH_SCALES) return;
                        if (!right) sum = sum + products[i];
                        float factor = weight;
                        if (WITH_SCALES) {
                            of_scale[i] = dot(query_rows.raw(i), sum, right ? of_scale[i] : 0.f);
                            factor *= query_rows.scale[i];
                        }
                        if (WITH_QUERY_ROWS) add_to_tile(query_tile, slot[i], sum, factor);
                    });
            }
            reduce(force);
            store_reduced(
                call.d_query_points + ranks, force, weight * inv_bandwidth, start == 0, N);
            if (WITH_SCALES && call.d_query_scale) {
                reduce(of_scale);
                store_reduced(call.d_query_scale + ranks, of_scale, weight, start == 0, N);
            }
#pragma unroll
            for (int i = 0; i < RANKS; ++i) products.x[i] = scratch.parked[i][threadIdx.x];
            collect(of_back, keys, &scratch.of_products[1]);
            collect_ties(of_back, keys, &scratch.tied[3], call.key_points + ranks, N);
            Products rows;
            forces(
                force, key_rows, of_keys, products, of_back, keys,
                [&](int i, Pair sum, bool right) {
                    rows.x[i] = right ? rows.x[i] + sum : sum + products[i];
                });
            reduce(force);
            store_reduced(call.d_key_points + ranks, force, weight * inv_bandwidth, start == 0, N);
            if (WITH_SCALES && call.d_key_scale) {
#pragma unroll
                for (int i = 0; i < RANKS; ++i) of_scale[i] = dot(key_rows.raw(i), rows[i], 0.f);
                reduce(of_scale);
                store_reduced(call.d_key_scale + ranks, of_scale, weight, start == 0, N);
            }
            if (call.dx) {
                const OfRanks<u32> slot = load_places(keys.ranks->slot);
#pragma unroll
                for (int i = 0; i < RANKS; ++i) {
                    const float factor = WITH_SCALES ? weight * key_rows.scale[i] : weight;
                    add_to_tile(key_tile, slot[i], rows[i], factor);
                }
            }
        }
        __syncthreads();
        if (call.dx) {
            add_tile(call.dx + (i64)head * call.keys * D, key_tile, call.keys, D, start,
                     call.blocks > 1);
        }
        if (WITH_QUERY_ROWS) {
            add_tile(call.dg + (i64)head * call.queries * D, query_tile, call.queries, D, start,
                     call.blocks > 1);
        }
        __syncthreads();
    }
}
#endif
