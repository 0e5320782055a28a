//! The learning rate of each step.

use super::TrainArgs;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Schedule {
    /// The same in every step
    Constant,
    /// Falls to a tenth along half a cosine
    Cosine,
    /// Falls to 0 along a line
    Linear,
}

impl Schedule {
    /// Returns the learning rate of the step after `done` steps.
    pub fn rate(self, args: &TrainArgs, done: u64) -> f32 {
        self.at(done, args.warmup, args.steps) * args.lr
    }

    /// Returns the rates of a run in words. Those of a constant rate are the same in a run of more steps.
    pub fn named(self, args: &TrainArgs) -> String {
        let (lr, warmup) = (args.lr, args.warmup);
        let over = match self {
            Self::Constant => "constant".to_owned(),
            Self::Cosine => format!("cosine over {} steps", args.steps),
            Self::Linear => format!("linear over {} steps", args.steps),
        };
        match warmup {
            0 => format!("{lr} {over}"),
            _ => format!("{lr} {over} after {warmup} of warm-up"),
        }
    }

    /// Returns its share of the full rate.
    fn at(self, done: u64, warmup: u64, steps: u64) -> f32 {
        if done < warmup {
            return (done + 1) as f32 / warmup as f32;
        }
        let span = steps.saturating_sub(warmup).max(1);
        let way = ((done - warmup) as f32 / span as f32).min(1.0);
        match self {
            Self::Constant => 1.0,
            Self::Cosine => 0.1 + 0.45 * (1.0 + (std::f32::consts::PI * way).cos()),
            Self::Linear => 1.0 - way,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule::*;

    #[test]
    fn rates_rise_and_then_follow_their_schedule() {
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
        for schedule in [Constant, Cosine, Linear] {
            near(schedule.at(0, 4, 20), 0.25);
            near(schedule.at(3, 4, 20), 1.0);
            near(schedule.at(4, 4, 20), 1.0);
        }
        near(Constant.at(19, 4, 20), 1.0);
        near(Cosine.at(12, 4, 20), 0.55);
        near(Cosine.at(20, 4, 20), 0.1);
        near(Linear.at(12, 4, 20), 0.5);
        near(Linear.at(99, 4, 20), 0.0);
        near(Linear.at(0, 0, 0), 1.0);
    }
}
