// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Timestamps of the timer's expiry and the switch-in of each measured thread. The thread reads them as soon as it runs, and
 * computes everything else.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "ways.bpf.h"
#include "occupancy.bpf.h"
#include "steps.bpf.h"
#include "window.bpf.h"
#include "activation.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum {
	STACK_FRAMES = 64,
};

enum irq_times {
	/* In place of the interrupt's timestamp: the thread armed its timer after the expiry. */
	ARMED_LATE = 1,
};

/* The kernel stack that the timer interrupt interrupted. */
struct interrupted_stack {
	s64 bytes;
	u64 frames[STACK_FRAMES];
};

/* A late activation with the evidence that explains it. */
struct late_activation {
	u64 due_ns;
	u64 irq_ns;
	u64 thread_ns;
	u32 tid;
	u32 cpu;
	struct interrupted_stack stack;
	struct window window;
};

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct activation activation;
	struct late_activation late_activation;
	enum irq_times irq_times;
} layouts = {};

/* Handler of the timers of measured threads; 0: unknown. */
const volatile u64 timer_function = 0;
/* Threads are those of the kernel's tracer, which do not set `due_ns`. */
const volatile bool of_tracer = false;
const volatile bool with_events = false;
/* Add the interrupted stack to late events. Costs 1 to 2 us per activation. */
const volatile bool with_stacks = false;

/* Too large for the stack; used with interrupts off, so that programs of this file do not nest there. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct late_activation);
} activation_to_send SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct interrupted_stack);
} interrupted_stack_here SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	/* User space enlarges it if causes are wanted. */
	__uint(max_entries, 4096);
} late_activations SEC(".maps");

static __always_inline void take_stack(void *ctx)
{
	struct interrupted_stack *stack;
	u32 zero = 0;

	stack = bpf_map_lookup_elem(&interrupted_stack_here, &zero);
	if (stack)
		stack->bytes = bpf_get_stack(ctx, stack->frames, sizeof(stack->frames), 0);
}

static __noinline int explain_late(struct activation *activation)
{
	struct late_activation *late;
	u32 zero = 0, count;
	u64 size, late_ns;

	if (!activation)
		return 0;
	late_ns = since(activation->thread_ns, activation->due_ns);
	if (!may_explain(&late_activations, sizeof(*late), late_ns, activation->thread_ns))
		return 0;
	late = bpf_map_lookup_elem(&activation_to_send, &zero);
	if (!late)
		return 0;
	late->due_ns = activation->due_ns;
	late->irq_ns = activation->irq_ns;
	late->thread_ns = activation->thread_ns;
	late->tid = activation->tid;
	late->cpu = bpf_get_smp_processor_id();
	late->stack.bytes = 0;
	if (with_stacks) {
		const struct interrupted_stack *stack = bpf_map_lookup_elem(&interrupted_stack_here, &zero);

		if (stack)
			late->stack = *stack;
	}
	count = copy_window(&late->window, late->due_ns, late->thread_ns);
	if (count > WINDOW_INTERVALS)
		count = WINDOW_INTERVALS;
	size = sizeof(*late) - (WINDOW_INTERVALS - count) * sizeof(struct interval);
	if (size > sizeof(*late))
		return 0;
	send_explained(&late_activations, late, size, late_ns);
	return 0;
}

static __always_inline void record_switch_in(struct activation *activation, u64 now_ns)
{
	activation->thread_ns = now_ns;
	if (!with_events)
		return;
	if (since(now_ns, activation->due_ns) >= activation->explain_over_ns ||
	    since(activation->irq_ns, activation->due_ns) >= activation->explain_irq_over_ns)
		explain_late(activation);
}

static __always_inline void find_task(struct activation *activation, const struct hrtimer *timer)
{
	const struct hrtimer_sleeper *sleeper = (const struct hrtimer_sleeper *)timer;
	const struct task_struct *task = of_tracer ? task_of_tracers_timer(timer) : BPF_CORE_READ(sleeper, task);

	activation->task = (u64)task;
	activation->tid = task ? shown_as(task, BPF_CORE_READ(task, pid)) : 0;
	if (is_called_by_account) {
		struct account *account = account_of(bpf_get_smp_processor_id());

		if (account)
			account->measured_task = (u64)task;
	}
}

/* Whether a timer of the right kind is that of the measured thread. */
static __always_inline bool is_measured_timer(struct activation *activation, const struct hrtimer *timer)
{
	if (!activation->is_measured)
		return false;
	if (of_tracer) {
		activation->due_ns = timer->_softexpires;
		activation->irq_ns = 0;
		activation->thread_ns = 0;
		/* Another thread may read the tracer's file by now. */
		activation->task = 0;
		return true;
	}
	/* Another thread's timer with the same expiry in nanoseconds would be a coincidence. */
	if ((u64)timer->_softexpires != activation->due_ns || activation->irq_ns)
		return false;
	/* The thread was stopped, or preempted on its way to sleep, and has run since: no interrupt was late. */
	if (__builtin_expect(activation->back_ns > activation->due_ns, 0)) {
		activation->irq_ns = ARMED_LATE;
		return false;
	}
	return true;
}

SEC("tp_btf/hrtimer_expire_entry")
int BPF_PROG(on_hrtimer_expire_entry, struct hrtimer *timer)
{
	struct activation *activation;
	struct task_struct *interrupted;
	u64 now_ns;

	if (timer_function && (u64)timer->function != timer_function)
		return 0;
	activation = activation_here();
	if (!activation || !is_measured_timer(activation, timer))
		return 0;
	now_ns = bpf_ktime_get_ns();
	/* Once per measurement. Unlikely code is placed apart, so that an activation fetches fewer cache lines of code. */
	if (__builtin_expect(!activation->task, 0))
		find_task(activation, timer);
	activation->irq_ns = now_ns;
	interrupted = bpf_get_current_task_btf();
	if (with_events && !interrupted->pid && since(now_ns, activation->due_ns) > activation->max_from_idle_ns)
		activation->max_from_idle_ns = since(now_ns, activation->due_ns);
	if (with_stacks)
		take_stack(ctx);
	/* The thread was about to sleep, and continues to run. */
	if (__builtin_expect(activation->task == (u64)interrupted, 0))
		record_switch_in(activation, now_ns);
	return 0;
}

static __always_inline void handle_switch_in(const struct task_struct *next)
{
	struct activation *activation = activation_here();

	if (!activation || activation->task != (u64)next)
		return;
	if (!activation->irq_ns)
		activation->back_ns = bpf_ktime_get_ns();
	/* Only the first switch-in after its timer: it may be preempted, or have received a signal. */
	else if (!activation->thread_ns && activation->irq_ns >= activation->due_ns && activation->due_ns)
		record_switch_in(activation, bpf_ktime_get_ns());
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	handle_switch_in(next);
	go_on_with_account(ctx);
	return 0;
}
