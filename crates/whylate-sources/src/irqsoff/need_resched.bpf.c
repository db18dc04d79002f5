// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long a CPU continues with a thread that is to be rescheduled: from when the kernel marks the running thread to the entry of the
 * scheduler there. Preemption was off at least as long, or the kernel came to no point where it checks.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "pid_namespace.bpf.h"
#include "stacks.bpf.h"
#include "ways.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum {
	UNKNOWN_BIT = 64,
};

enum mark_lost {
	/* The mark was set before it was known which flag means "at once". */
	MARK_UNKNOWN_BIT,
	/* No room for a record: the reader is too slow. */
	MARK_RECORDS,
	MARK_LOST_REASONS,
};

/* The mark of a CPU's running thread. */
struct mark {
	/* 0: none. The CPU that sets the mark may be another one. */
	u64 task;
	u64 since_ns;
	/* The thread's number of switches by then: a mark of another run slice is ignored. */
	u64 switches;
	/* Set by user space. */
	u64 is_watched;
	u64 lost[MARK_LOST_REASONS];
	/* Taken by the first timer interrupt since then. */
	struct stack_taken inside;
	u64 _unused[9];
};
_Static_assert(sizeof(struct mark) % 64 == 0, "two CPUs share a cache line");

/* A thread that ignored a reschedule request for too long. */
struct kept {
	u64 since_ns;
	u64 end_ns;
	u32 cpu;
	u32 tid;
	char comm[16];
	struct stack_taken inside;
	/* Where the scheduler was entered. */
	struct stack_taken at_end;
};

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct mark mark;
	struct kept kept;
	enum mark_lost mark_lost;
} layouts = {};

/* Minimum length; shorter ones do not count. */
const volatile u64 from_ns = 0;

/*
 * Number of the flag that means "at once"; UNKNOWN_BIT until known: idle threads are marked by no other. It is the smaller one
 * (TIF_NEED_RESCHED, TIF_NEED_RESCHED_LAZY); both depend on the version and the processor.
 */
u32 need_resched_bit = UNKNOWN_BIT;
/* Set by user space while a real-time thread makes the kernel mark another one so: others may get either flag then. */
volatile u32 learning = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct mark);
} mark_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 21);
} kept_cpus SEC(".maps");

static __always_inline struct mark *mark_of(u32 cpu)
{
	struct mark *mark = bpf_map_lookup_elem(&mark_by_cpu, &cpu);

	return mark && mark->is_watched ? mark : NULL;
}

static __always_inline u64 switches_of(const struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

/*
 * The kernel calls this if the flag was not set yet. A flag that means "on return to user space, or at the next tick" (lazy preemption) is
 * followed by the other one when the kernel waits no longer.
 */
SEC("tp_btf/sched_set_need_resched_tp")
int BPF_PROG(on_sched_set_need_resched_tp, struct task_struct *task, int cpu, int flag)
{
	struct mark *mark;

	if ((learning || task->pid == 0) && (u32)flag < need_resched_bit)
		need_resched_bit = flag;
	if (task->pid == 0)
		return 0;
	mark = mark_of(cpu);
	if (!mark)
		return 0;
	if (need_resched_bit == UNKNOWN_BIT) {
		__sync_fetch_and_add(&mark->lost[MARK_UNKNOWN_BIT], 1);
		return 0;
	}
	if ((u32)flag != need_resched_bit)
		return 0;
	/* The thread may be about to enter the scheduler on its CPU. */
	*(volatile u64 *)&mark->task = 0;
	mark->inside.bytes = 0;
	mark->since_ns = bpf_ktime_get_ns();
	mark->switches = switches_of(task);
	barrier();
	*(volatile u64 *)&mark->task = (u64)task;
	return 0;
}

/* Returns the mark if it is still the running thread's: if it was cleared unseen, its flag is gone or the thread was switched. */
static __always_inline struct mark *mark_here(void)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct mark *mark = mark_of(bpf_get_smp_processor_id());

	if (!mark || mark->task != (u64)task || mark->switches != switches_of(task) || !(task->thread_info.flags & (1ul << (need_resched_bit & 31))))
		return NULL;
	return mark;
}

/* A timer's interrupt takes the stack of the thread that still runs. */
SEC("tp_btf/hrtimer_expire_entry")
int BPF_PROG(on_hrtimer_expire_entry)
{
	struct mark *mark = mark_here();

	if (mark && mark->inside.bytes == 0)
		mark->inside.bytes = bpf_get_stack(ctx, mark->inside.frames, sizeof(mark->inside.frames), 0);
	return 0;
}

SEC("tp_btf/sched_entry_tp")
int BPF_PROG(on_sched_entry_tp)
{
	struct mark *mark = mark_here();
	struct task_struct *task;
	struct kept *kept;
	u64 now_ns;

	if (!mark)
		return 0;
	now_ns = bpf_ktime_get_ns();
	mark->task = 0;
	if (since(now_ns, mark->since_ns) < from_ns)
		return 0;
	kept = bpf_ringbuf_reserve(&kept_cpus, sizeof(*kept), 0);
	if (!kept) {
		__sync_fetch_and_add(&mark->lost[MARK_RECORDS], 1);
		return 0;
	}
	task = bpf_get_current_task_btf();
	kept->since_ns = mark->since_ns;
	kept->end_ns = now_ns;
	kept->cpu = bpf_get_smp_processor_id();
	kept->tid = shown_number(task);
	__builtin_memcpy(kept->comm, task->comm, sizeof(kept->comm));
	__builtin_memcpy(&kept->inside, &mark->inside, sizeof(kept->inside));
	kept->at_end.bytes = bpf_get_stack(ctx, kept->at_end.frames, sizeof(kept->at_end.frames), 0);
	bpf_ringbuf_submit(kept, 0);
	return 0;
}
