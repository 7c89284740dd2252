/*
 * A libnvidia-ml.so.1 for tests: answers from a memory-mapped file that the test changes while it runs.
 *
 * Every call takes the latency set for it, can be made to hang, to fail for one GPU or to be lost altogether. The layout
 * of the file is `struct state` below; `layout.py` beside this file describes the same bytes to Python, and a test checks
 * that both agree. The file's name is in FAKE_NVML_STATE and is mapped anew by every nvmlInit, so that one process can go
 * through several.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10 };

enum { MAX_GPUS = 16, MAX_MIG = 7, MAX_FIELDS = 96, MAX_PROCESSES = 64, MAX_EVENTS = 32, MAX_SAMPLES = 256 };

/* One latency and one error for each kind of call; the order is that of CALLS in layout.py. */
enum call { CALL_HANDLE, CALL_UTILIZATION, CALL_MEMORY, CALL_TEMPERATURE, CALL_POWER, CALL_LIMIT, CALL_CLOCK, CALL_FAN,
            CALL_ENERGY, CALL_FIELDS, CALL_REASONS, CALL_PROCESSES, CALL_SAMPLES, CALL_PCIE_THROUGHPUT, CALL_OTHER, CALLS };

struct field {
    uint32_t id, scope;
    int32_t result;       /* nvmlReturn of this field */
    uint32_t type;        /* nvmlValueType */
    uint64_t value;       /* the union's bits */
    int64_t timestamp_us; /* 0: the time of the call */
    int64_t latency_us;   /* reported, and taken */
    int64_t period_us;    /* > 0: the sensor renews itself this often: its timestamp steps, its value wobbles by `wobble` */
    uint64_t wobble;
};

struct process { uint32_t pid, pad; uint64_t memory; };
struct event { uint64_t type, data; };
struct sample { uint64_t timestamp_us, value; };

struct mig { char uuid[96], name[96]; uint64_t memory_total, memory_used; };

struct gpu {
    char uuid[96], name[96];
    uint32_t domain, bus, device, hang;
    uint32_t utilization, memory_utilization;
    uint64_t memory_total, memory_used, memory_reserved;
    uint32_t power_mw, limit_mw;
    int32_t temperature;
    uint32_t fan;
    uint32_t clocks_mhz[4];
    uint32_t thresholds[4];
    uint64_t energy_mj;
    uint64_t energy_since_us; /* > 0: the energy counter has been growing with power_mw since then */
    uint64_t reasons, supported_reasons;
    uint32_t mig_mode, mig_count;
    struct mig mig[MAX_MIG];
    uint32_t field_count, process_count, sample_count, event_count;
    struct field fields[MAX_FIELDS];
    struct process processes[MAX_PROCESSES];
    struct sample samples[MAX_SAMPLES];
    struct event events[MAX_EVENTS];
    int32_t errors[CALLS];     /* nvmlReturn for this GPU and call; 0: none */
    int32_t error;             /* nvmlReturn for every call of this GPU; 15 is GPU_IS_LOST */
    uint32_t pad;
    uint32_t latency_us[CALLS]; /* slept, as a driver that waits for its firmware does */
    uint32_t spin_us[CALLS];    /* burnt, as a driver that works does */
    uint64_t calls[CALLS];      /* how often each was made: written by this library */
};

struct state {
    uint32_t magic, gpu_count;
    int32_t init_result;
    uint32_t pad;
    char driver_version[96];
    struct gpu gpus[MAX_GPUS];
};

typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned version, sensor; int temperature; } temperature_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned id, scope; long long timestamp, latency; unsigned type; int result; uint64_t value; } value_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { unsigned long long timestamp; uint64_t value; } sample_t;

/* Handles: a GPU's number + 1, with a MIG device's number + 1 in the next byte. */
#define HANDLE(gpu, mig) ((void *)(uintptr_t)(((mig) << 8) | ((gpu) + 1)))
#define GPU_OF(handle) (((uintptr_t)(handle)&0xff) - 1)
#define MIG_OF(handle) (((uintptr_t)(handle) >> 8) & 0xff)

static struct state *volatile state;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void wait_us(uint32_t slept, uint32_t spun) {
    if (slept) {
        struct timespec t = {slept / 1000000, (long)(slept % 1000000) * 1000};
        nanosleep(&t, NULL);
    }
    if (spun) {
        struct timespec from, now;
        clock_gettime(CLOCK_MONOTONIC, &from);
        do {
            clock_gettime(CLOCK_MONOTONIC, &now);
        } while ((now.tv_sec - from.tv_sec) * 1000000 + (now.tv_nsec - from.tv_nsec) / 1000 < (long)spun);
    }
}

/* Begin a call on a GPU: latency, hang, errors. */
static int begin(void *handle, enum call call, struct gpu **gpu) {
    struct state *s = state;
    if (!s) return UNINITIALIZED;
    unsigned number = GPU_OF(handle);
    if (!handle || number >= s->gpu_count) return INVALID_ARGUMENT;
    struct gpu *g = *gpu = &s->gpus[number];
    __atomic_fetch_add(&g->calls[call], 1, __ATOMIC_RELAXED);
    wait_us(g->latency_us[call], g->spin_us[call]);
    while (*(volatile uint32_t *)&g->hang) wait_us(5000, 0);
    return g->error ? g->error : g->errors[call];
}

#define BEGIN(call)                              \
    struct gpu *g;                               \
    int result_ = begin(handle, call, &g);       \
    if (result_) return result_

/* What a MIG device leaves to the GPU it is a part of. */
#define WHOLE_GPU_ONLY if (MIG_OF(handle)) return NOT_SUPPORTED

static int text(const char *from, char *to, unsigned size) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_STATE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return DRIVER_NOT_LOADED;
    struct stat status;
    /* A mapping is never undone: a call that hangs may still be using it. */
    void *map = fstat(file, &status) == 0 && status.st_size >= (off_t)sizeof(struct state)
                    ? mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                    : MAP_FAILED;
    close(file);
    if (map == MAP_FAILED || ((struct state *)map)->magic != 0x4c4d564e) return DRIVER_NOT_LOADED;
    if (((struct state *)map)->init_result) return ((struct state *)map)->init_result;
    state = map;
    return SUCCESS;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown(void) { return SUCCESS; }

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    return state ? text(state->driver_version, version, size) : UNINITIALIZED;
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned size) { return text("13.fake", version, size); }

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!state) return UNINITIALIZED;
    *count = state->gpu_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!state) return UNINITIALIZED;
    if (index >= state->gpu_count) return INVALID_ARGUMENT;
    struct gpu *g;
    *device = HANDLE(index, 0);
    return begin(*device, CALL_HANDLE, &g);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!state) return UNINITIALIZED;
    for (unsigned i = 0; i < state->gpu_count; i++) {
        struct gpu *g = &state->gpus[i], *unused;
        if (!strcmp(g->uuid, uuid)) {
            *device = HANDLE(i, 0);
            return begin(*device, CALL_HANDLE, &unused);
        }
        for (unsigned m = 0; m < g->mig_count; m++)
            if (!strcmp(g->mig[m].uuid, uuid)) {
                *device = HANDLE(i, m + 1);
                return begin(*device, CALL_HANDLE, &unused);
            }
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    BEGIN(CALL_OTHER);
    return text(MIG_OF(handle) ? g->mig[MIG_OF(handle) - 1].uuid : g->uuid, uuid, size);
}

EXPORT int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    BEGIN(CALL_OTHER);
    return text(MIG_OF(handle) ? g->mig[MIG_OF(handle) - 1].name : g->name, name, size);
}

EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    BEGIN(CALL_OTHER);
    *index = GPU_OF(handle);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    memset(pci, 0, sizeof *pci);
    pci->domain = g->domain, pci->bus = g->bus, pci->device = g->device;
    const char digits[] = "0123456789ABCDEF";
    char id[] = "00000000:00:00.0";
    id[9] = digits[g->bus >> 4 & 15], id[10] = digits[g->bus & 15];
    id[12] = digits[g->device >> 4 & 15], id[13] = digits[g->device & 15];
    strcpy(pci->bus_id, id);
    memcpy(pci->legacy, id + 4, 13);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    *current = *pending = g->mig_mode;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    *count = g->mig_mode ? MAX_MIG : 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **device) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    if (index >= g->mig_count) return NOT_FOUND;
    *device = HANDLE(GPU_OF(handle), index + 1);
    return SUCCESS;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_mig) {
    BEGIN(CALL_OTHER);
    *is_mig = MIG_OF(handle) != 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    BEGIN(CALL_UTILIZATION);
    WHOLE_GPU_ONLY;
    rates->gpu = g->utilization, rates->memory = g->memory_utilization;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    BEGIN(CALL_MEMORY);
    if (memory->version != 0x02000028) return INVALID_ARGUMENT;
    unsigned m = MIG_OF(handle);
    memory->total = m ? g->mig[m - 1].memory_total : g->memory_total;
    memory->used = m ? g->mig[m - 1].memory_used : g->memory_used;
    memory->reserved = m ? 0 : g->memory_reserved;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    BEGIN(CALL_MEMORY);
    unsigned m = MIG_OF(handle);
    memory->total = m ? g->mig[m - 1].memory_total : g->memory_total;
    memory->used = m ? g->mig[m - 1].memory_used : g->memory_used + g->memory_reserved;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    BEGIN(CALL_TEMPERATURE);
    WHOLE_GPU_ONLY;
    if (sensor) return INVALID_ARGUMENT;
    *celsius = (unsigned)g->temperature;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperatureV(void *handle, temperature_t *temperature) {
    BEGIN(CALL_TEMPERATURE);
    WHOLE_GPU_ONLY;
    if (temperature->version != 0x0100000C || temperature->sensor) return INVALID_ARGUMENT;
    temperature->temperature = g->temperature;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned threshold, unsigned *celsius) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    if (threshold > 3 || !g->thresholds[threshold]) return NOT_SUPPORTED;
    *celsius = g->thresholds[threshold];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    BEGIN(CALL_POWER);
    WHOLE_GPU_ONLY;
    *milliwatts = g->power_mw;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    BEGIN(CALL_LIMIT);
    WHOLE_GPU_ONLY;
    *milliwatts = g->limit_mw;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
    return nvmlDeviceGetEnforcedPowerLimit(handle, milliwatts);
}

static uint64_t energy(const struct gpu *g) {
    if (!g->energy_since_us) return g->energy_mj;
    return g->energy_mj + (uint64_t)((now_us() - (int64_t)g->energy_since_us) * (double)g->power_mw / 1e6);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    BEGIN(CALL_ENERGY);
    WHOLE_GPU_ONLY;
    *millijoules = energy(g);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(void *handle, unsigned domain, unsigned *megahertz) {
    BEGIN(CALL_CLOCK);
    WHOLE_GPU_ONLY;
    if (domain > 3) return INVALID_ARGUMENT;
    *megahertz = g->clocks_mhz[domain];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(void *handle, unsigned domain, unsigned *megahertz) {
    return nvmlDeviceGetClockInfo(handle, domain, megahertz);
}

EXPORT int nvmlDeviceGetFanSpeed(void *handle, unsigned *percent) {
    BEGIN(CALL_FAN);
    WHOLE_GPU_ONLY;
    if (g->fan == UINT32_MAX) return NOT_SUPPORTED;
    *percent = g->fan;
    return SUCCESS;
}

/* Idle here; asked for by other monitors. */
EXPORT int nvmlDeviceGetEncoderUtilization(void *handle, unsigned *percent, unsigned *period_us) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    *percent = 0, *period_us = 167000;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDecoderUtilization(void *handle, unsigned *percent, unsigned *period_us) {
    return nvmlDeviceGetEncoderUtilization(handle, percent, period_us);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    BEGIN(CALL_REASONS);
    WHOLE_GPU_ONLY;
    *reasons = g->reasons;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}

EXPORT int nvmlDeviceGetSupportedClocksEventReasons(void *handle, unsigned long long *reasons) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    *reasons = g->supported_reasons;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetSupportedClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return nvmlDeviceGetSupportedClocksEventReasons(handle, reasons);
}

static void answer(const struct gpu *g, const struct field *f, value_t *value) {
    int64_t now = now_us();
    if (f->latency_us) wait_us(0, (uint32_t)f->latency_us);
    value->latency = f->latency_us;
    value->timestamp = f->timestamp_us ? f->timestamp_us : now;
    value->type = f->type;
    value->result = f->result;
    value->value = f->value;
    if (f->period_us > 0) {
        int64_t step = now / f->period_us;
        value->timestamp = step * f->period_us;
        value->value = f->value + (uint64_t)(step % 7) * f->wobble;
    }
    if (f->id == 83 && !f->value) value->value = energy(g);
    if (f->id == 186 && !f->value && !f->result) value->value = g->power_mw;
}

EXPORT int nvmlDeviceGetFieldValues(void *handle, int count, value_t *values) {
    BEGIN(CALL_FIELDS);
    for (int i = 0; i < count; i++) {
        const struct field *found = NULL;
        for (uint32_t f = 0; f < g->field_count && !MIG_OF(handle); f++)
            if (g->fields[f].id == values[i].id && g->fields[f].scope == values[i].scope) found = &g->fields[f];
        if (found)
            answer(g, found, &values[i]);
        else
            values[i].result = NOT_SUPPORTED, values[i].value = 0;
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    BEGIN(CALL_PROCESSES);
    unsigned room = *count;
    *count = g->process_count;
    if (!g->process_count) return SUCCESS;
    if (!processes || room < g->process_count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < g->process_count; i++)
        processes[i] = (process_t){g->processes[i].pid, g->processes[i].memory, UINT32_MAX, UINT32_MAX};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    BEGIN(CALL_PROCESSES);
    (void)processes;
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *kilobytes) {
    BEGIN(CALL_PCIE_THROUGHPUT);
    WHOLE_GPU_ONLY;
    (void)counter;
    *kilobytes = 1000;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetSamples(void *handle, unsigned type, unsigned long long last, unsigned *value_type,
                                unsigned *count, sample_t *samples) {
    BEGIN(CALL_SAMPLES);
    WHOLE_GPU_ONLY;
    if (type != 0) return NOT_SUPPORTED; /* total power only */
    unsigned found = 0;
    *value_type = 1;
    for (uint32_t i = 0; i < g->sample_count; i++) {
        if (g->samples[i].timestamp_us <= last) continue;
        if (samples) {
            if (found >= *count) return INSUFFICIENT_SIZE;
            samples[found] = (sample_t){g->samples[i].timestamp_us, g->samples[i].value};
        }
        found++;
    }
    *count = found;
    return found ? SUCCESS : NOT_FOUND;
}

/* Events: a set remembers which GPUs it watches and how many events of each it has handed out. */
struct event_set { uint32_t watched[MAX_GPUS]; uint32_t seen[MAX_GPUS]; };

EXPORT int nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof **set);
    return *set ? SUCCESS : 999;
}

EXPORT int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set) {
    BEGIN(CALL_OTHER);
    WHOLE_GPU_ONLY;
    (void)types;
    set->watched[GPU_OF(handle)] = 1;
    set->seen[GPU_OF(handle)] = g->event_count;
    return SUCCESS;
}

/* Hand out the next event of a watched GPU, if there is one; `only` is the last watched GPU. */
static int next_event(struct event_set *set, event_t *event, struct gpu **only, uint32_t *number) {
    struct state *s = state;
    for (uint32_t i = 0; s && i < s->gpu_count; i++) {
        struct gpu *g = &s->gpus[i];
        if (!set->watched[i]) continue;
        *only = g, *number = i;
        if (set->seen[i] >= __atomic_load_n(&g->event_count, __ATOMIC_ACQUIRE)) continue;
        struct event *e = &g->events[set->seen[i]++ % MAX_EVENTS];
        *event = (event_t){HANDLE(i, 0), e->type, e->data, UINT32_MAX, UINT32_MAX};
        return 1;
    }
    return 0;
}

EXPORT int nvmlEventSetWait_v2(struct event_set *set, event_t *event, unsigned timeout_ms) {
    int64_t deadline = now_us() + (int64_t)timeout_ms * 1000;
    struct gpu *gpu = NULL;
    uint32_t number = 0;
    while (!next_event(set, event, &gpu, &number)) {
        int64_t left = deadline - now_us();
        if (left <= 0) return TIMEOUT;
        struct timespec t = {left / 1000000, (long)(left % 1000000) * 1000};
        /* Sleep until the count of events changes, as cheaply as a driver does; the one who raises an event wakes us. */
        if (gpu)
            syscall(SYS_futex, &gpu->event_count, FUTEX_WAIT, set->seen[number], &t, NULL, 0);
        else
            nanosleep(&t, NULL);
    }
    return SUCCESS;
}

EXPORT int nvmlEventSetFree(struct event_set *set) {
    free(set);
    return SUCCESS;
}

/* For the test that compares this layout with Python's. */
EXPORT unsigned long fake_nvml_state_size(void) { return sizeof(struct state); }
EXPORT unsigned long fake_nvml_gpu_size(void) { return sizeof(struct gpu); }
