// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Samples the running threads of a program: a timer of each CPU (perf's software clock) sends the kernel stack of the
 * thread that it interrupts, its user registers and a copy of the top of its user stack. A running thread is at another
 * address each time, so there is no rule for it yet: user space unwinds the copy. 0.1 us for other threads, 6 us for
 * those of the program.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "registers.bpf.h"
#include "pid_namespace.bpf.h"
#include "wanted_threads.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum cpu_sample_limits {
	KERNEL_FRAMES = 64,
	PAGE_BYTES = 4096,
	/* Maximum bytes of a user stack that are copied. */
	STACK_BYTES = 4 * PAGE_BYTES,
	/* Minimum size of the ring buffer: 480 samples of deep stacks. */
	RING_BYTES = 1 << 23,
	SEEN_PROCESSES = 8192,
	/* Maximum distance of a descendant from its ancestor. */
	GENERATIONS = 24,
	/* User space is woken for the first samples of a process, as short processes have to be looked at while they exist. */
	PROMPT_SAMPLES = 4,
	/* Maximum time that a sample stands for, in periods: a virtual machine may have been paused. */
	MAX_PERIODS = 4,
};

enum {
	/* Code segment of 64-bit programs on x86 (arch/x86/include/asm/segment.h, __USER_CS). */
	X86_USER_CS = 0x33,
};

/* Bits of task_struct.flags (include/linux/sched.h). */
enum {
	PF_USER_WORKER = 0x4000,
	PF_KTHREAD = 0x200000,
};

/* Samples that could not be counted, by reason. */
enum lost_sample {
	/* No room in the ring buffer. */
	LOST_SAMPLES,
	/* The kernel's stack could not be read, so it is not known what was interrupted. */
	LOST_KERNEL_STACKS,
	LOST_SAMPLE_REASONS,
};

/* Code of a thread outside the kernel. */
enum user_code {
	/* A kernel thread, or one that works for a program in the kernel. */
	NO_USER_CODE,
	/* A 32-bit program, or an architecture without an unwinder. */
	OTHER_USER_CODE,
	/* Its registers and stack are in the sample. */
	UNWINDABLE_USER_CODE,
};

/* A thread that ran when the timer of its CPU expired. */
struct cpu_sample {
	u64 at_ns;
	/* Time since the timer of this CPU expired before, at most some periods: what the sample stands for. */
	u64 ns;
	/* Distinguishes a process from later ones with its PID. */
	u64 started_ns;
	/* Where its program's code ends, and its stack and arguments begin: some of it differs after an exec. */
	u64 end_code;
	u64 start_stack;
	u64 arg_start;
	/* User registers: those saved when the thread entered the kernel. */
	u64 ip;
	u64 sp;
	u64 bp;
	/* As shown. */
	u32 tid;
	u32 tgid;
	/* Number of programs that the process has executed. */
	u32 execs;
	/* -1: none. */
	s32 syscall;
	u32 kernel_frames;
	enum user_code user_code;
	u64 kernel[KERNEL_FRAMES];
};

/* As it is sent, with the bytes that were copied. */
struct sample_with_stack {
	struct cpu_sample sample;
	/*
	 * The user stack from `sp` on, rounded down to a multiple of 8. A page more than is used, so that the verifier sees
	 * that each copy fits.
	 */
	u64 stack[(STACK_BYTES + PAGE_BYTES) / 8];
};

struct process_identity {
	u64 started_ns;
	u64 tgid;
};

struct seen_process {
	u32 execs;
	u32 samples;
};

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct cpu_sample cpu_sample;
	enum cpu_sample_limits cpu_sample_limits;
	enum lost_sample lost_sample;
	enum user_code user_code;
} layouts = {};

/* In the first PID namespace; 0: all. */
const volatile s32 wanted_tgid = 0;
/* Selects descendants of this process, in the first PID namespace; 0: all. */
const volatile s32 wanted_ancestor = 0;
const volatile s32 own_tgid = 0;

/* Run time of the program. */
u64 spent_ns = 0;
/* Number of times that a timer expired. */
u64 expiries = 0;
/* Period of the timers. */
u64 period_ns = 0;

LOST_EVENTS(lost_sample, LOST_SAMPLE_REASONS)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} cpu_samples SEC(".maps");

/* The program's processes that were sampled. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SEEN_PROCESSES);
	__type(key, struct process_identity);
	__type(value, struct seen_process);
} seen_by_process SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct sample_with_stack);
} sample_of_cpu SEC(".maps");

/* Time at which the timer of a CPU expired last; 0: never. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} expired_ns_of_cpu SEC(".maps");

static __always_inline bool is_descendant(const struct task_struct *task)
{
	for (u32 generation = 0; generation < GENERATIONS && task; generation++) {
		task = BPF_CORE_READ(task, real_parent);
		s32 tgid = BPF_CORE_READ(task, tgid);

		if (tgid == wanted_ancestor)
			return true;
		if (tgid <= 1)
			return false;
	}
	return false;
}

/* Copies the top of the user stack. Pages that are not present end it. */
static __always_inline u64 copy_stack(struct sample_with_stack *to)
{
	/* 64-bit: the verifier of 6.1 derives no bounds from 32-bit arithmetic. */
	u64 from = to->sample.sp & ~7ull, copied = 0;

	for (u32 page = 0; page < STACK_BYTES / PAGE_BYTES; page++) {
		u64 bytes = PAGE_BYTES - (from & (PAGE_BYTES - 1));

		if (copied > STACK_BYTES || bytes > PAGE_BYTES ||
		    bpf_probe_read_user((void *)to->stack + copied, bytes, (void *)from))
			break;
		copied += bytes;
		from += bytes;
	}
	return copied;
}

/* Whether it belongs to the program; `seen` is its process, if it was sampled before. */
static __always_inline bool is_of_program(struct task_struct *task, const struct seen_process *seen)
{
	if (!task->pid || task->tgid == own_tgid || (wanted_tgid && task->tgid != wanted_tgid))
		return false;
	/* An orphaned process still belongs to the program. */
	if (wanted_ancestor)
		return seen || is_descendant(task);
	return is_wanted(task, false);
}

static __always_inline void send_sample(void *ctx, struct task_struct *task, u64 now_ns, u64 ns)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);
	struct process_identity identity = {};
	struct seen_process first = {};
	struct seen_process *seen;
	struct sample_with_stack *sent;
	struct cpu_sample *sample;
	u64 flags = BPF_RB_NO_WAKEUP;
	u64 sent_bytes = sizeof(*sample);
	u32 zero = 0;
	long bytes;

	identity.started_ns = BPF_CORE_READ(task, group_leader, start_time);
	identity.tgid = task->tgid;
	seen = bpf_map_lookup_elem(&seen_by_process, &identity);
	if (!is_of_program(task, seen))
		return;
	sent = bpf_map_lookup_elem(&sample_of_cpu, &zero);
	if (!sent)
		return;
	sample = &sent->sample;
	if (!seen) {
		first.execs = task->self_exec_id;
		bpf_map_update_elem(&seen_by_process, &identity, &first, BPF_ANY);
		flags = BPF_RB_FORCE_WAKEUP;
	} else {
		if (seen->execs != task->self_exec_id) {
			seen->execs = task->self_exec_id;
			seen->samples = 0;
		}
		if (seen->samples < PROMPT_SAMPLES) {
			seen->samples++;
			flags = BPF_RB_FORCE_WAKEUP;
		}
	}
	sample->at_ns = now_ns;
	sample->ns = ns;
	sample->started_ns = identity.started_ns;
	sample->tid = shown_number(task);
	sample->tgid = shown_process(task);
	sample->execs = task->self_exec_id;
	sample->syscall = -1;
	/* Empty if user code is interrupted. */
	bytes = bpf_get_stack(ctx, sample->kernel, sizeof(sample->kernel), 0);
	if (bytes < 0) {
		lose(LOST_KERNEL_STACKS);
		return;
	}
	sample->kernel_frames = (u64)bytes / 8;
	if (sample->kernel_frames)
		sample->syscall = syscall_of(task);
	sample->user_code = NO_USER_CODE;
	/* At the end of a thread, its memory is gone. */
	if (task->mm && !(task->flags & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER)))
		sample->user_code = OTHER_USER_CODE;
	if (sample->user_code && bpf_core_field_exists(regs->ip) && (u16)regs->cs == X86_USER_CS) {
		sample->user_code = UNWINDABLE_USER_CODE;
		sample->end_code = BPF_CORE_READ(task, mm, end_code);
		sample->start_stack = BPF_CORE_READ(task, mm, start_stack);
		sample->arg_start = BPF_CORE_READ(task, mm, arg_start);
		sample->ip = regs->ip;
		sample->sp = regs->sp;
		sample->bp = regs->bp;
		sent_bytes += copy_stack(sent);
	}
	if (bpf_ringbuf_query(&cpu_samples, BPF_RB_AVAIL_DATA) > bpf_ringbuf_query(&cpu_samples, BPF_RB_RING_SIZE) / 2)
		flags = BPF_RB_FORCE_WAKEUP;
	if (sent_bytes > sizeof(*sent) || bpf_ringbuf_output(&cpu_samples, sent, sent_bytes, flags))
		lose(LOST_SAMPLES);
}

/* Returns the time since the timer of this CPU expired before, at most some periods. */
static __always_inline u64 since_last_expiry(u64 now_ns)
{
	u32 zero = 0;
	u64 *expired_ns = bpf_map_lookup_elem(&expired_ns_of_cpu, &zero);
	u64 before_ns;

	if (!expired_ns)
		return period_ns;
	before_ns = *expired_ns;
	*expired_ns = now_ns;
	if (!before_ns)
		return period_ns;
	if (now_ns - before_ns > MAX_PERIODS * period_ns)
		return MAX_PERIODS * period_ns;
	return now_ns - before_ns;
}

SEC("perf_event")
int on_cpu_clock(void *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 now_ns = bpf_ktime_get_ns();
	u64 ns = since_last_expiry(now_ns);

	__sync_fetch_and_add(&expiries, 1);
	if (!task->pid)
		return 0;
	send_sample(ctx, task, now_ns, ns);
	__sync_fetch_and_add(&spent_ns, bpf_ktime_get_ns() - now_ns);
	return 0;
}
