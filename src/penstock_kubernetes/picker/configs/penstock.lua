-- Asks the picker which worker takes a request. Each thread has this for itself. Made by: {{COMMAND}}
local PICKERS = { {{PICKERS}} }
local PATIENCE = 10 -- seconds: a queued request waits at the picker
local SET = { "x-request-id", "x-data-parallel-rank", "x-prefiller-host-port" }
local IDLE_MAX = 64 -- kept connections to one picker
local turn, idle = 0, {}
for number = 1, #PICKERS do idle[number] = {} end

local function read(picker)
  local line = picker:receive("*l")
  if not line then return end
  local status, headers = tonumber(line:match("^HTTP/1%.1 (%d+)")), {}
  while true do
    line = picker:receive("*l")
    if not line then return end
    local name, value = line:match("^([^:]+):%s*(.-)%s*$")
    if not name then break end
    headers[name:lower()] = value
  end
  local length = tonumber(headers["content-length"] or "0")
  return status, headers, length > 0 and picker:receive(length) or ""
end

-- Asks the pickers in turn. A kept connection may have been closed by its picker meanwhile: then it costs one more try.
local function ask(question)
  for _ = 1, #PICKERS do
    turn = turn % #PICKERS + 1
    local pool, kept = idle[turn], nil
    repeat
      local began, picker = core.now().sec, table.remove(pool)
      kept = picker ~= nil
      picker = picker or core.tcp()
      picker:settimeout(PATIENCE)
      if (kept or picker:connect(PICKERS[turn])) and picker:send(question) then
        local status, headers, answer = read(picker)
        if status then
          if headers["connection"] ~= "close" and #pool < IDLE_MAX then pool[#pool + 1] = picker else picker:close() end
          return status, headers, answer
        end
        if core.now().sec - began >= PATIENCE // 2 then -- asked, and too slow
          picker:close()
          return
        end
      end
      picker:close()
    until not kept
  end
end

core.register_action("penstock_pick", { "http-req" }, function(txn)
  local body, path = txn.f:req_body() or "", txn.f:path()
  local lines = { "POST " .. path .. " HTTP/1.1", "host: penstock", "content-length: " .. #body,
    "x-penstock-length: " .. (txn.f:req_body_size() or #body), "x-real-ip: " .. (txn.f:src() or "") }
  local client = txn.http:req_get_headers()
  for name, values in pairs(client) do
    if name:match("^x%-penstock%-") == nil and (name:match("^x%-") or name == "authorization"
        or name == "content-type" or name == "traceparent" or name == "content-encoding") and name ~= "x-real-ip" then
      lines[#lines + 1] = name .. ": " .. values[0]
    end
  end
  local status, headers, answer = ask(table.concat(lines, "\r\n") .. "\r\n\r\n" .. body)
  if not status then return end
  local engine = headers["x-penstock-engine"]
  if not engine then
    local reply = txn:reply({ status = status, body = answer })
    for _, name in ipairs({ "content-type", "retry-after", "x-request-id" }) do
      if headers[name] then reply:add_header(name, headers[name]) end
    end
    txn:done(reply)
  end
  txn:set_var("txn.penstock_id", headers["x-request-id"])
  txn:set_var("txn.penstock_by", headers["x-penstock-picker"])
  for _, name in ipairs(SET) do
    if headers[name] then txn.http:req_set_header(name, headers[name]) end
  end
  local scheme, endpoint = engine:match("^(https?)://(.+)$")
  local name = endpoint:gsub("[%[%]]", "")
  if core.backends["penstock_workers"].servers[name] then
    txn:set_var("txn.penstock_worker", name)
  elseif scheme == "http" then -- one that workers.cfg does not name yet
    txn:set_var("txn.penstock_host", (endpoint:match("^%[?(.-)%]?:%d+$")))
    txn:set_var("txn.penstock_port", endpoint:match(":(%d+)$"))
    txn:set_var("txn.penstock_worker", "penstock_other")
  end
end)
