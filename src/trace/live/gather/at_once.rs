//! A question to many processes at the same time, with one deadline for all of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// Processes that are queried at the same time.
const AT_ONCE: usize = 128;

/// The answers of `asked` until the deadline, in their order; None for a process that gives none.
///
/// A thread that still waits for an answer then is left to its own time limit. A name server, or a socket whose process
/// is stopped, may delay it for longer than the user is to wait.
pub(crate) fn ask<Q, A>(
    asked: Vec<Q>,
    deadline: Instant,
    question: impl Fn(&Q) -> A + Send + Sync + 'static,
) -> Vec<Option<A>>
where
    Q: Send + Sync + 'static,
    A: Send + 'static,
{
    let mut answers: Vec<Option<A>> = asked.iter().map(|_| None).collect();
    let threads = asked.len().min(AT_ONCE);
    let shared = Arc::new((asked, question, AtomicUsize::new(0)));
    let (tell, told) = mpsc::channel();
    for _ in 0..threads {
        let (shared, tell) = (Arc::clone(&shared), tell.clone());
        let work = move || {
            let (asked, question, next) = &*shared;
            while Instant::now() < deadline {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(one) = asked.get(number) else { return };
                if tell.send((number, question(one))).is_err() {
                    return;
                }
            }
        };
        // If no further thread can start, the others do its part.
        if crate::os::thread::spawn("towline-ask", work).is_err() {
            break;
        }
    }
    drop(tell);
    while let Ok((number, answer)) = told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        answers[number] = Some(answer);
    }
    answers
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_are_asked_whatever_their_number_and_their_answers_stay_in_order() {
        let asked: Vec<usize> = (0..3 * AT_ONCE).collect();
        let answers = ask(asked.clone(), Instant::now() + Duration::from_secs(60), |number| *number);
        assert_eq!(answers.into_iter().flatten().collect::<Vec<_>>(), asked);
    }

    #[test]
    fn those_that_do_not_answer_hide_none_that_do() {
        let deadline = Instant::now() + Duration::from_secs(2);
        let slow = |number: &usize| std::thread::sleep(Duration::from_secs(600 * (1 - *number as u64 % 2)));
        let answers = ask((0..40).collect(), deadline, slow);
        assert!(Instant::now() < deadline + Duration::from_secs(20));
        let told: Vec<usize> = (0..40).filter(|&number| answers[number].is_some()).collect();
        assert_eq!(told, (0..40).filter(|number| number % 2 == 1).collect::<Vec<_>>());
    }
}
