-- What the other scripts stand on. scripts.py puts these names above: K (keys), the constants, and
-- BATCH and SHARD (states.py: from -> set of to).
--
-- Fence: epoch and owner, both. An epoch alone could repeat after the server lost its last second.

local LEASES, BATCHES, MODELS, META = K.leases, K.batches, K.models, K.meta

local operation = {}

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function digits(number)
  return string.format('%.0f', number)
end

local function exact(number)
  return string.format('%.17g', number)
end

-- The one place where a state changes. Raises on a change that the table does not have.
local function move(machine, key, to)
  local from = redis.call('HGET', key, 'st')
  if not (from and machine[from][to]) then
    error('no way from ' .. tostring(from) .. ' to ' .. to .. ': ' .. key)
  end
  redis.call('HSET', key, 'st', to)
end

local function may(machine, from, to)
  return from and machine[from][to] or false
end
