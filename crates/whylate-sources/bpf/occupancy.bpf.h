/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Who has each CPU: the account that src/occupancy keeps. User space gives its maps to the programs of sources too. */
#pragma once

#include "cgroup.bpf.h"
#include "pid_namespace.bpf.h"

enum occupancy_limits {
	/* Intervals kept per CPU: 40 ms of a CPU that switches 100,000 times a second. */
	INTERVAL_BITS = 12,
	INTERVALS = 1 << INTERVAL_BITS,
	/* Intervals that one late event carries; older ones are merged by occupant. */
	WINDOW_INTERVALS = 256,
	MERGED_PARTS = 32,
	/* How many slots an occupant may lie away from its home among the merged parts. */
	MERGED_PROBES = 4,
	/* What explaining one late event costs beside the walk through the account, in steps of that. */
	EXPLAIN_EVENT_STEPS = 64,
	/* So many a second and CPU are its budget, and twice as many in a second after one without. */
	EXPLAIN_STEPS = 250000,
};

enum occupant_kind {
	/* Before the first switch on the CPU. */
	OCCUPANT_NOBODY,
	OCCUPANT_IDLE,
	/* `handler` is its cgroup's number. */
	OCCUPANT_THREAD,
	/* A worker thread with the item `handler`. */
	OCCUPANT_WORK,
	OCCUPANT_SOFTIRQ,
	/* A device's handler: `id` is the interrupt's number, `name` the handler's. */
	OCCUPANT_DEVICE_IRQ,
	/* `id` is an enum irq_vector. */
	OCCUPANT_VECTOR,
};

/* Interrupts that no device makes. */
enum irq_vector {
	VECTOR_LOCAL_TIMER,
	VECTOR_RESCHEDULE,
	VECTOR_CALL_FUNCTION,
	VECTOR_CALL_FUNCTION_SINGLE,
	VECTOR_IRQ_WORK,
	VECTOR_PLATFORM_IPI,
	VECTOR_THERMAL,
	VECTOR_THRESHOLD,
	VECTOR_DEFERRED_ERROR,
	VECTOR_ERROR,
	VECTOR_SPURIOUS,
	/* Other architectures: `name` says which. */
	VECTOR_NAMED,
};

enum busy_pools {
	BUSY_NORMAL = 1 << 0,
	BUSY_HIGHPRI = 1 << 1,
};

/* One occupant without a break. It ends where the next one begins. */
struct interval {
	u64 start_ns;
	u64 handler;
	u32 id;
	/* enum occupant_kind */
	u8 kind;
	/* enum busy_pools */
	u8 busy;
	u16 _unused;
	u32 steal_ns;
	u32 nmi_ns;
	char name[16];
};

/* An interrupt that came late has no handler: its place holds these. */
struct lateness {
	u32 late_ns;
	/* Of the stack that it found; negative without one. */
	s32 stack;
};

/* The state of one CPU's account. Only programs on that CPU write it. */
struct account {
	/* When the present occupant began; 0 before the first switch. */
	u64 since_ns;
	/* How many intervals have been written. */
	u32 written;
	/* A program is at work: what interrupts it must not be. */
	u8 is_busy;
	/* Bits of enum switch_step: whose programs the present switch concerns, as far as they have not run. */
	u8 steps;
	/* Of the interrupt, while `in_irq`. */
	u8 irq_kind;
	u8 _unused_yet;

	/* The thread that has the CPU, below interrupts; its item, or 0, and its cgroup. */
	u64 handler;
	u64 cgroup;
	u32 tid;
	u8 kind;
	/* enum busy_pools of the thread itself, if it has an item. */
	u8 own_pool;
	u8 in_irq;
	/* Number of the softirq plus one. */
	u8 softirq;
	char name[16];
	/* Workers with an item that were preempted, by pool; 0 for none. */
	u32 preempted_normal;
	u32 preempted_highpri;
	/* The thread here whose timer is measured, by its struct task_struct; its source writes it. */
	u64 measured_task;

	/* Sums, and what they were when the present occupant began. */
	u64 nmi_ns;
	u64 nmi_seen_ns;
	u64 steal_seen_ns;

	/* The interrupt, while `in_irq`. */
	struct lateness lateness;
	u32 irq_id;
	char irq_name[16];
	/* The thread's number as it is shown; not written in the first PID namespace, where it is `tid`. */
	u32 shown_tid;
	/* What is above is used at each switch and interrupt, and takes two cache lines. */

	/* Events that came while a program was at work. */
	u64 nested;
	u64 stacks_lost;
	/* How often another thread had the CPU than the one that was seen taking it. */
	u64 astray;
	/* No stack is taken before. */
	u64 next_stack_ns;
	/* Until then the budget for explaining is used up. */
	u64 explained_until_ns;
	/* CPUs share no cache line. */
	u64 _unused[3];
};
_Static_assert(__builtin_offsetof(struct account, nested) == 128, "what is used at each switch takes more than two cache lines");
_Static_assert(sizeof(struct account) % 64 == 0, "accounts of two CPUs share a cache line");

/* Late events of one source that have no causes. */
struct unexplained {
	/* Those beyond the budget of their CPU. */
	u64 over_budget;
	/* Those that found no room: the reader is too slow. */
	u64 no_room;
	/* How late all of these were in all. */
	u64 late_ns;
};

struct merged_part {
	u64 ns;
	u64 handler;
	u64 steal_ns;
	u64 nmi_ns;
	u32 id;
	u32 kind;
	char name[16];
};

/* The account of one CPU from a moment until now. */
struct window {
	/* No gap from here on. */
	u64 since_ns;
	u64 end_ns;
	u64 merged_start_ns;
	u64 merged_end_ns;
	u32 cpu;
	/* How many of `intervals` are in use, the latest first. */
	u32 count;
	struct merged_part merged[MERGED_PARTS];
	struct interval intervals[WINDOW_INTERVALS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct account);
} account_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it INTERVALS long for each CPU. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct interval);
} intervals_by_position SEC(".maps");

static __always_inline struct account *account_of(u32 cpu)
{
	return bpf_map_lookup_elem(&account_by_cpu, &cpu);
}

static __always_inline struct interval *interval_at(u32 cpu, u32 position)
{
	u32 index = (cpu << INTERVAL_BITS) | (position & (INTERVALS - 1));

	return bpf_map_lookup_elem(&intervals_by_position, &index);
}

static __always_inline void describe_thread(struct interval *interval, const struct account *account)
{
	interval->handler = account->handler ? account->handler : account->cgroup;
	interval->id = own_namespace ? account->shown_tid : account->tid;
	interval->kind = account->handler ? OCCUPANT_WORK : account->kind;
	__builtin_memcpy(interval->name, account->name, sizeof(interval->name));
}

/* Writes down who has the CPU now. */
static __always_inline void describe(struct interval *interval, const struct account *account)
{
	interval->start_ns = account->since_ns;
	interval->busy = account->own_pool;
	if (account->preempted_normal)
		interval->busy |= BUSY_NORMAL;
	if (account->preempted_highpri)
		interval->busy |= BUSY_HIGHPRI;
	interval->steal_ns = 0;
	interval->nmi_ns = account->nmi_ns - account->nmi_seen_ns;
	if (account->in_irq) {
		interval->handler = *(const u64 *)&account->lateness;
		interval->id = account->irq_id;
		interval->kind = account->irq_kind;
		__builtin_memcpy(interval->name, account->irq_name, sizeof(interval->name));
	} else if (account->softirq) {
		interval->handler = 0;
		interval->id = account->softirq - 1;
		interval->kind = OCCUPANT_SOFTIRQ;
	} else {
		describe_thread(interval, account);
	}
}
