// SPDX-License-Identifier: MIT OR Apache-2.0
// Works for a millisecond in outer(), which calls inner(), and then executes another program: the number of times, and
// the other program, are the arguments. Two builds have the functions at each other's addresses.
#include <stdio.h>
#include <stdlib.h>
#include <sys/personality.h>
#include <time.h>
#include <unistd.h>

#define AT_A_PAGE __attribute__((noipa, aligned(4096)))

static volatile unsigned long sink;
static unsigned long began_ns;

static inline unsigned long cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000ul + now.tv_nsec;
}

static inline __attribute__((always_inline)) void work_until(unsigned long after_ns)
{
    do {
        unsigned long x = sink;
        for (int i = 0; i < 20000; i++)
            x = x * 6364136223846793005ul + 1;
        sink = x;
    } while (cpu_ns() - began_ns < after_ns);
}

void inner(void);

#ifdef OUTER_FIRST
AT_A_PAGE void outer(void)
{
    work_until(500000);
    inner();
    sink++;
}
#endif

AT_A_PAGE void inner(void)
{
    work_until(1000000);
    sink++;
}

#ifndef OUTER_FIRST
AT_A_PAGE void outer(void)
{
    work_until(500000);
    inner();
    sink++;
}
#endif

int main(int count, char **arguments)
{
    char left[20];
    // The other program has its stack where this one has its own, and only other arguments.
    personality(ADDR_NO_RANDOMIZE);
    // An exec does not reset the clock.
    began_ns = cpu_ns();
    outer();
    snprintf(left, sizeof(left), "%d", atoi(arguments[1]) - 1);
    if (count != 3 || left[0] == '0')
        return count != 3;
    execl(arguments[2], arguments[2], left, arguments[0], NULL);
    return 1;
}
